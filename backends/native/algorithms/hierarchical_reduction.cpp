#include "algorithms/hierarchical_reduction.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "algorithms/chunks.hpp"
#include "algorithms/machine_partials.hpp"
#include "algorithms/pipeline.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// Elements of a chunk of a message that is reduced.
std::size_t reduced_chunk(std::size_t count, const MachinePartials& partials, bool raw) {
  const std::size_t element = partials.element();
  const std::size_t wanted = std::max(count * element / kChunksWanted, kLeastChunk) / element;
  // Windows: contributions and results in elements, slices of partials in accumulators, at least two ranks.
  const std::size_t most =
      raw ? kMostChunk / element
          : Pipeline::kRegionBytes / Pipeline::kSlots / (2 * element + (partials.accumulator() + 1) / 2);
  return std::max(round_down(std::min(wanted, most), kSliceAlignment), kSliceAlignment);
}

// all_reduce and reduce: phase 1 brings each machine the others' partials of its share, phase 2 the shares of
// results to whoever wants them.
class HierarchicalReduction final : public Pipeline {
 public:
  HierarchicalReduction(CollectiveContext& collective, std::byte* data, std::size_t count,
                        const Reduction& reduction, int root)
      : HierarchicalReduction(collective, data, count, reduction, root,
                              MachinePartials(collective.topology(), reduction)) {}

 private:
  HierarchicalReduction(CollectiveContext& collective, std::byte* data, std::size_t count,
                        const Reduction& reduction, int root, const MachinePartials& partials)
      : HierarchicalReduction(
            collective, data, reduction, root, partials,
            Pieces{.total = count,
                   .step = reduced_chunk(count, partials, one_rank_per_machine(collective.topology()))}) {}

  HierarchicalReduction(CollectiveContext& collective, std::byte* data, const Reduction& reduction, int root,
                        const MachinePartials& partials, const Pieces& chunks)
      : Pipeline(collective, channels_of(collective.topology()), chunks.count(),
                 {.fills = true,
                  .reduces = true,
                  .two_phases = true,
                  .lag = kDepth * smallest_machine(collective.topology())}),
        data_(data),
        reduction_(reduction),
        root_(root),
        partials_(partials),
        element_(partials.element()),
        chunks_(chunks),
        me_(local_index(collective.topology(), collective.rank())) {
    collective.engage_team(chunks.total * element_);
    share_ = split_evenly(chunks_.step, machines()).step;
    slice_ = split_evenly(chunks_.step, local_.size()).step;
    if (!single_rank()) {
      contributions_ = collective.open_region(kSlots * chunks_.step * element_);
      slices_ = collective.open_region(kSlots * slice_ * partials_.accumulator());
      results_ = collective.open_region(kSlots * chunks_.step * element_);
    }
    if (!is_gateway()) return;
    // Of `kDepth` chunks: the others' partials of the own share and the own one, and results nobody here
    // wants.
    place_ = share_ * partials_.widest();
    const std::size_t places = kDepth * machines() * place_;
    const std::size_t kept = kDepth * share_ * element_;
    memory_ = collective.streams().scratch(places + kept + partials_.scratch_bytes(share_));
    kept_results_ = memory_ + places;
    widened_ = kept_results_ + kept;
  }

  Pieces shares(std::uint64_t c) const { return split_evenly(chunks_.length(c), machines()); }
  Pieces slices(std::uint64_t c) const { return split_evenly(chunks_.length(c), local_.size()); }
  std::byte* tensor(std::uint64_t c, std::size_t at) const {
    return data_ + (chunks_.begin(c) + at) * element_;
  }
  std::byte* contribution(int rank, std::uint64_t c, std::size_t at) const {
    return collective_.region(rank, contributions_) + ((c % kSlots) * chunks_.step + at) * element_;
  }
  std::byte* slice(int rank, std::uint64_t c) const {
    return collective_.region(rank, slices_) + (c % kSlots) * slice_ * partials_.accumulator();
  }
  std::byte* place(std::uint64_t c, std::size_t machine) const {
    return memory_ + ((turn(c) % kDepth) * machines() + machine) * place_;
  }
  bool machine_wants(std::size_t machine) const {
    return root_ < 0 || collective_.topology().of(root_) == static_cast<int>(machine);
  }
  std::size_t own() const { return as_index(machine_); }
  std::byte* result(std::uint64_t c, std::size_t at) const {
    if (!single_rank()) {
      return collective_.region(gateway(c), results_) + ((turn(c) % kSlots) * chunks_.step + at) * element_;
    }
    return machine_wants(own()) ? tensor(c, at) : kept_results_ + (c % kDepth) * share_ * element_;
  }

  void fill(std::uint64_t c) override {
    const Pieces parts = slices(c);
    const std::size_t begin = parts.begin(me_);
    const std::size_t end = parts.begin(me_ + 1);
    collective_.team().copy(contribution(collective_.rank(), c, 0), tensor(c, 0), begin * element_);
    collective_.team().copy(contribution(collective_.rank(), c, end), tensor(c, end),
                            (parts.total - end) * element_);
  }

  void reduce(std::uint64_t c) override {
    const Pieces parts = slices(c);
    const void** sources = collective_.sources();
    for (std::size_t i = 0; i < local_.size(); ++i) {
      sources[i] = i == me_ ? tensor(c, parts.begin(me_)) : contribution(local_[i], c, parts.begin(me_));
    }
    collective_.team().accumulate(slice(collective_.rank(), c), sources, static_cast<int>(local_.size()),
                                  parts.length(me_), reduction_);
  }

  // Calls `take(address, bytes)` for the parts of this machine's partial of a range.
  template <class Take>
  void each_partial(std::uint64_t c, std::size_t begin, std::size_t end, Take&& take) const {
    if (begin >= end) return;
    if (single_rank()) return take(tensor(c, begin), (end - begin) * element_);
    const Pieces parts = slices(c);
    for (std::size_t i = 0; i < local_.size(); ++i) {
      const std::size_t from = std::max(begin, parts.begin(i));
      const std::size_t to = std::min(end, parts.begin(i + 1));
      if (from >= to) continue;
      take(slice(local_[i], c) + (from - parts.begin(i)) * partials_.accumulator(),
           (to - from) * partials_.accumulator());
    }
  }

  void keep(std::uint64_t c) override {
    if (single_rank()) return;
    const Pieces parts = shares(c);
    std::byte* to = place(c, own());
    each_partial(c, parts.begin(own()), parts.begin(own() + 1),
                 [&](const std::byte* from, std::size_t bytes) {
                   collective_.team().copy(to, from, bytes);
                   to += bytes;
                 });
  }

  void send_first(std::uint64_t c, int machine) override {
    const Pieces parts = shares(c);
    const std::size_t theirs = as_index(machine);
    each_partial(c, parts.begin(theirs), parts.begin(theirs + 1),
                 [&](const std::byte* from, std::size_t bytes) { stream(machine).send(from, bytes); });
  }

  bool first_has_room(std::uint64_t c) const override { return turn(c) < combined() + kDepth; }

  void receive_first(std::uint64_t c, int machine) override {
    const std::size_t theirs = as_index(machine);
    stream(machine).receive(place(c, theirs), shares(c).length(own()) * partials_.bytes_of(theirs));
  }

  bool results_have_room(std::uint64_t c) const override {
    if (!single_rank()) {
      const std::uint64_t slots = result_slots();
      return c < slots || (all_drained(c - slots) && second_has_left(c - slots));
    }
    return c < kDepth || machine_wants(own()) || second_has_left(c - kDepth);
  }

  void combine(std::uint64_t c) override {
    const Pieces parts = shares(c);
    const std::size_t begin = parts.begin(own());
    partials_.combine(collective_.team(), result(c, begin), parts.length(own()), widened_,
                      [&](std::size_t machine) {
                        return machine == own() && single_rank() ? tensor(c, begin) : place(c, machine);
                      });
  }

  void send_second(std::uint64_t c, int machine) override {
    if (!machine_wants(as_index(machine))) return;
    const Pieces parts = shares(c);
    stream(machine).send(result(c, parts.begin(own())), parts.length(own()) * element_);
  }

  void receive_second(std::uint64_t c, int machine) override {
    if (!machine_wants(own())) return;
    const Pieces parts = shares(c);
    const std::size_t theirs = as_index(machine);
    stream(machine).receive(result(c, parts.begin(theirs)), parts.length(theirs) * element_);
  }

  void finish(std::uint64_t c) override {
    if (single_rank() || !(root_ < 0 || root_ == collective_.rank())) return;
    collective_.team().copy(tensor(c, 0), result(c, 0), chunks_.length(c) * element_);
  }

  std::byte* data_;
  const Reduction& reduction_;
  const int root_;
  MachinePartials partials_;
  const std::size_t element_;
  const Pieces chunks_;
  const std::size_t me_;  // among the local ranks
  std::size_t share_ = 0;
  std::size_t slice_ = 0;
  std::size_t contributions_ = 0;
  std::size_t slices_ = 0;
  std::size_t results_ = 0;
  std::size_t place_ = 0;
  std::byte* memory_ = nullptr;
  std::byte* kept_results_ = nullptr;
  std::byte* widened_ = nullptr;
};

}  // namespace

void hierarchical_all_reduce(CollectiveContext& collective, std::byte* data, std::size_t count,
                             const Reduction& reduction) {
  HierarchicalReduction(collective, data, count, reduction, -1).run();
}

void hierarchical_reduce(CollectiveContext& collective, std::byte* data, std::size_t count,
                         const Reduction& reduction, int root) {
  HierarchicalReduction(collective, data, count, reduction, root).run();
}

}  // namespace collectives
