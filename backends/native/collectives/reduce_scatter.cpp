// reduce_scatter. Staged: every rank stages all its parts, and reduces those that are for it. Staged in
// parts: the same, and machines send each other partials of the parts that their ranks need. Chunked: every
// rank fills chunks of its ring that hold a piece for each rank, and reduces its piece of the others' chunks.
// Hierarchical: each machine sends its partial for a rank once to that rank's machine.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/machine_partials.hpp"
#include "algorithms/pipeline.hpp"
#include "algorithms/staged_partials.hpp"
#include "collectives/collectives.hpp"
#include "common/codes.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// Elements of a piece for one rank, such that every machine's regions have room: contributions for all ranks,
// partials for the remote ranks that one local rank takes care of and for itself, and the others' partials.
std::size_t scattered_piece(const Topology& topology, const MachinePartials& partials, std::size_t longest) {
  const std::size_t ranks = topology.machine_of.size();
  const std::size_t machines = topology.machines.size();
  const std::size_t wanted = moved_chunk(longest * partials.element()) / partials.element();
  // Nothing but memory of its own limits a rank that is alone; shorter pieces would be more messages.
  std::size_t room = one_rank_per_machine(topology)
                         ? std::max(kMostChunk / machines / partials.element(), kSliceAlignment)
                         : wanted;
  for (const auto& machine : topology.machines) {
    const std::size_t local = machine.size();
    if (local == 1) continue;
    const std::size_t bytes = ranks * partials.element() +
                              ((ranks - local) / local + 2) * partials.accumulator() +
                              local * (machines - 1) * partials.accumulator();
    room = std::min(room, Pipeline::kRegionBytes / Pipeline::kSlots / bytes);
  }
  return fitted_piece(wanted, room);
}

class HierarchicalReduceScatter final : public Pipeline {
 public:
  HierarchicalReduceScatter(CollectiveContext& collective, std::byte* output, const std::vector<Part>& parts,
                            const Reduction& reduction)
      : HierarchicalReduceScatter(collective, output, parts, reduction,
                                  MachinePartials(collective.topology(), reduction)) {}

 private:
  HierarchicalReduceScatter(CollectiveContext& collective, std::byte* output, const std::vector<Part>& parts,
                            const Reduction& reduction, const MachinePartials& partials)
      : HierarchicalReduceScatter(collective, output, parts, reduction, partials,
                                  longest_bytes(parts) / size_of(reduction.dtype)) {}
  HierarchicalReduceScatter(CollectiveContext& collective, std::byte* output, const std::vector<Part>& parts,
                            const Reduction& reduction, const MachinePartials& partials, std::size_t longest)
      : HierarchicalReduceScatter(
            collective, output, parts, reduction, partials,
            Pieces{.total = longest, .step = scattered_piece(collective.topology(), partials, longest)}) {}

  HierarchicalReduceScatter(CollectiveContext& collective, std::byte* output, const std::vector<Part>& parts,
                            const Reduction& reduction, const MachinePartials& partials, const Pieces& pieces)
      : Pipeline(collective, channels_of(collective.topology()), pieces.count(),
                 {.fills = true, .reduces = true, .lag = kSlots - 1}),
        output_(output),
        parts_(parts),
        reduction_(reduction),
        partials_(partials),
        element_(partials.element()),
        step_(pieces.step) {
    collective.engage_team(total_bytes(parts));
    const Topology& topology = collective.topology();
    index_.resize(parts.size());
    std::size_t remote = 0;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      if (!topology.is_local(static_cast<int>(r))) index_[r] = remote++;
    }
    for (std::size_t i = 0; i < local_.size(); ++i) index_[as_index(local_[i])] = i;
    own_place_ = (remote + local_.size() - 1) / local_.size();
    received_bytes_ = step_ * partials_.widest();
    const std::size_t received_bytes = local_.size() * (machines() - 1) * received_bytes_;
    const std::size_t widened = partials_.scratch_bytes(step_);
    if (single_rank()) {
      memory_ = collective.streams().scratch(kDepth * received_bytes + widened);
      widened_ = memory_ + kDepth * received_bytes;
    } else {
      contributions_ = collective.open_region(kSlots * parts.size() * step_ * element_);
      partial_region_ = collective.open_region(kSlots * (own_place_ + 1) * step_ * partials_.accumulator());
      received_region_ = collective.open_region(kSlots * received_bytes);
      widened_ = collective.streams().scratch(widened);
    }
  }

  Pieces pieces(int rank) const { return {.total = parts_[as_index(rank)].bytes / element_, .step = step_}; }
  std::byte* part(int rank, std::uint64_t c) const {
    return parts_[as_index(rank)].data + pieces(rank).begin(c) * element_;
  }
  std::byte* contribution(int rank, std::uint64_t c, int to) const {
    return collective_.region(rank, contributions_) +
           ((c % kSlots) * parts_.size() + as_index(to)) * step_ * element_;
  }
  // This machine's partial for a remote rank, or for `rank` itself.
  std::byte* partial(int rank, std::uint64_t c, std::size_t at) const {
    return collective_.region(rank, partial_region_) +
           ((c % kSlots) * (own_place_ + 1) + at) * step_ * partials_.accumulator();
  }
  // The partial of another machine for a local rank.
  std::byte* received(std::uint64_t c, int to, std::size_t machine) const {
    const std::size_t other = machine < as_index(machine_) ? machine : machine - 1;
    const std::size_t place = index_[as_index(to)] * (machines() - 1) + other;
    const std::size_t slot = local_.size() * (machines() - 1) * received_bytes_;
    return (single_rank() ? memory_ + (c % kDepth) * slot
                          : collective_.region(gateway(c), received_region_) + (c % kSlots) * slot) +
           place * received_bytes_;
  }
  std::size_t me() const { return index_[as_index(collective_.rank())]; }

  void fill(std::uint64_t c) override {
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const int to = static_cast<int>(r);
      if (to == collective_.rank()) continue;
      collective_.team().copy(contribution(collective_.rank(), c, to), part(to, c),
                              pieces(to).length(c) * element_);
    }
  }
  void accumulate_for(int to, std::uint64_t c, std::byte* dst) {
    const void** sources = collective_.sources();
    for (std::size_t i = 0; i < local_.size(); ++i) {
      sources[i] = local_[i] == collective_.rank() ? part(to, c) : contribution(local_[i], c, to);
    }
    collective_.team().accumulate(dst, sources, static_cast<int>(local_.size()), pieces(to).length(c),
                                  reduction_);
  }
  void reduce(std::uint64_t c) override {
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const int to = static_cast<int>(r);
      if (collective_.topology().is_local(to) || index_[r] % local_.size() != me()) continue;
      accumulate_for(to, c, partial(collective_.rank(), c, index_[r] / local_.size()));
    }
    accumulate_for(collective_.rank(), c, partial(collective_.rank(), c, own_place_));
  }
  void send_first(std::uint64_t c, int machine) override {
    for (const int to : collective_.topology().machines[as_index(machine)]) {
      const std::size_t index = index_[as_index(to)];
      const std::byte* from =
          single_rank() ? part(to, c) : partial(local_[index % local_.size()], c, index / local_.size());
      stream(machine).send(from, pieces(to).length(c) * partials_.bytes_of(as_index(machine_)));
    }
  }
  void receive_first(std::uint64_t c, int machine) override {
    const std::size_t theirs = as_index(machine);
    for (const int to : local_) {
      stream(machine).receive(received(c, to, theirs), pieces(to).length(c) * partials_.bytes_of(theirs));
    }
  }
  bool first_has_room(std::uint64_t c) const override {
    return single_rank() ? c < finished() + kDepth : c < kSlots || all_drained(c - kSlots);
  }
  bool results_have_room(std::uint64_t) const override { return true; }

  void finish(std::uint64_t c) override {
    const int me = collective_.rank();
    const Pieces mine = pieces(me);
    partials_.combine(
        collective_.team(), output_ + mine.begin(c) * element_, mine.length(c), widened_,
        [&](std::size_t machine) {
          if (machine != as_index(machine_)) return static_cast<const std::byte*>(received(c, me, machine));
          return static_cast<const std::byte*>(single_rank() ? part(me, c) : partial(me, c, own_place_));
        });
  }

  std::byte* output_;
  const std::vector<Part>& parts_;
  const Reduction& reduction_;
  MachinePartials partials_;
  const std::size_t element_;
  const std::size_t step_;
  std::vector<std::size_t> index_;  // of local ranks among them, of remote ranks among those
  std::size_t own_place_ = 0;
  std::size_t received_bytes_ = 0;
  std::size_t contributions_ = 0;
  std::size_t partial_region_ = 0;
  std::size_t received_region_ = 0;
  std::byte* memory_ = nullptr;
  std::byte* widened_ = nullptr;
};

}  // namespace

void reduce_scatter(CollectiveContext& collective, std::byte* output, const std::vector<Part>& parts,
                    const Reduction& reduction) {
  const int me = collective.rank();
  const int ranks = collective.size();
  const std::size_t element = size_of(reduction.dtype);
  const Part& mine = parts[static_cast<std::size_t>(me)];
  const std::size_t total = total_bytes(parts);
  const std::size_t width = widest_between(collective.topology(), reduction);
  std::size_t for_machine = 0;
  for (const auto& local : collective.topology().machines) {
    std::size_t bytes = 0;
    for (const int r : local) bytes += parts[as_index(r)].bytes / element * width;
    for_machine = std::max(for_machine, bytes);
  }
  const Algorithm algorithm = collective.algorithm(Opcode::reduce_scatter, total, for_machine);
  if (algorithm == Algorithm::local) {
    collective.engage_team(mine.bytes);
    if (output != mine.data) collective.team().copy(output, mine.data, mine.bytes);
    return reduce_local(collective, output, mine.bytes / element, reduction);
  }
  const void** sources = collective.sources();
  if (algorithm == Algorithm::staged) {
    collective.reserve(total);
    std::byte* stage = collective.stage(total);
    std::size_t offset = 0;
    std::size_t my_offset = 0;
    for (int r = 0; r < ranks; ++r) {
      const Part& part = parts[static_cast<std::size_t>(r)];
      if (r == me) {
        my_offset = offset;
      } else {
        collectives::copy(stage + offset, part.data, part.bytes);
      }
      offset += part.bytes;
    }
    collective.arrive_and_wait();
    for (int r = 0; r < ranks; ++r)
      sources[r] = r == me ? mine.data : collective.staged(r, total) + my_offset;
    return reduce_by_machine(collective.topology(), output, sources, mine.bytes / element, reduction);
  }
  if (algorithm == Algorithm::staged_in_parts) {
    std::vector<StagedPartials::Range> ranges;
    std::size_t begin = 0;
    for (const Part& part : parts) {
      ranges.push_back({.begin = begin, .length = part.bytes / element});
      begin += ranges.back().length;
    }
    StagedPartials partials(collective, reduction, begin,
                            StagedPartials::by_machine(collective.topology(), ranges));
    std::byte* stage = partials.stage();
    for (int r = 0; r < ranks; ++r)
      collectives::copy(stage + ranges[as_index(r)].begin * element, parts[as_index(r)].data,
                        parts[as_index(r)].bytes);
    collective.arrive_with(partials);
    return partials.combine(output, local_index(collective.topology(), me));
  }

  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical) {
    return HierarchicalReduceScatter(collective, output, parts, reduction).run();
  }
  // A chunk holds a piece for each rank, at equal distances.
  const std::size_t step = collective.begin_pieces(total);
  const std::uint64_t chunks = Pieces{.total = longest_bytes(parts), .step = step}.count();
  collective.open_rings(chunks, static_cast<std::size_t>(ranks) * step);
  for (std::uint64_t i = 0; i <= chunks; ++i) {
    if (i < chunks) {
      collective.await_room(i);
      collective.team().split_items(as_index(ranks - 1), step,
                                    [&](std::size_t other, std::size_t begin, std::size_t end) {
                                      const std::size_t r = (as_index(me + 1) + other) % as_index(ranks);
                                      const Pieces pieces{.total = parts[r].bytes, .step = step};
                                      end = std::min(end, pieces.length(i));
                                      if (begin >= end) return;
                                      collectives::copy(collective.chunk(me, i) + r * step + begin,
                                                        parts[r].data + pieces.begin(i) + begin, end - begin);
                                    });
      collective.filled(i);
    }
    if (i == 0) continue;
    const std::uint64_t c = i - 1;
    const Pieces pieces{.total = mine.bytes, .step = step};
    for (int r = 0; r < ranks; ++r) {
      if (r != me) collective.await_filled(r, c);
      sources[r] = r == me ? mine.data + pieces.begin(c)
                           : collective.chunk(r, c) + static_cast<std::size_t>(me) * step;
    }
    std::byte* taken = collective.chunk((me + 1) % ranks, c) + static_cast<std::size_t>(me) * step;
    collective.team().reduce(output + pieces.begin(c), sources, ranks, pieces.length(c) / element, reduction,
                             {.second = taken});  // as in reduce.cpp, for its cache lines
    collective.drained(c);
  }
}

}  // namespace collectives
