// all_gather. Staged: everybody stages and copies. Chunked: every rank fills chunks of its ring and drains
// the others', one chunk behind. Hierarchical: each machine sends its ranks' contributions once to each other
// machine.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/pipeline.hpp"
#include "collectives/collectives.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// Bytes of a piece of one rank's contribution.
std::size_t gathered_piece(const Topology& topology, std::size_t longest) {
  if (one_rank_per_machine(topology)) return moved_chunk(longest);
  const std::size_t most = Pipeline::kRegionBytes / Pipeline::kSlots / topology.machine_of.size();
  return fitted_piece(moved_chunk(longest), most);
}

class HierarchicalAllGather final : public Pipeline {
 public:
  HierarchicalAllGather(CollectiveContext& collective, const std::vector<Part>& outputs,
                        const std::byte* input)
      : HierarchicalAllGather(collective, outputs, input,
                              gathered_piece(collective.topology(), longest_bytes(outputs))) {}

 private:
  HierarchicalAllGather(CollectiveContext& collective, const std::vector<Part>& outputs,
                        const std::byte* input, std::size_t step)
      : Pipeline(collective, channels_of(collective.topology()),
                 Pieces{.total = longest_bytes(outputs), .step = step}.count(),
                 {.fills = true, .lag = kSlots - 1}),
        outputs_(outputs),
        input_(input),
        step_(step) {
    collective.engage_team(total_bytes(outputs));
    if (single_rank()) return;
    contributions_ = collective.open_region(kSlots * step_);
    remote_ = outputs_.size() - local_.size();
    received_region_ = collective.open_region(kSlots * remote_ * step_);
    index_.resize(outputs_.size());
    std::size_t next = 0;
    for (std::size_t r = 0; r < outputs_.size(); ++r) {
      if (!collective.topology().is_local(static_cast<int>(r))) index_[r] = next++;
    }
  }

  Pieces pieces(int rank) const { return {.total = outputs_[as_index(rank)].bytes, .step = step_}; }
  std::byte* output(int rank, std::uint64_t c) const {
    return outputs_[as_index(rank)].data + pieces(rank).begin(c);
  }
  std::byte* contribution(int rank, std::uint64_t c) const {
    return collective_.region(rank, contributions_) + (c % kSlots) * step_;
  }
  std::byte* received(int rank, std::uint64_t c) const {
    return collective_.region(gateway(c), received_region_) +
           ((c % kSlots) * remote_ + index_[as_index(rank)]) * step_;
  }

  void fill(std::uint64_t c) override {
    const Pieces mine = pieces(collective_.rank());
    collective_.team().copy(contribution(collective_.rank(), c), input_ + mine.begin(c), mine.length(c));
  }
  void send_first(std::uint64_t c, int machine) override {
    for (const int r : local_) {
      const Pieces theirs = pieces(r);
      stream(machine).send(single_rank() ? input_ + theirs.begin(c) : contribution(r, c), theirs.length(c));
    }
  }
  void receive_first(std::uint64_t c, int machine) override {
    for (const int r : collective_.topology().machines[as_index(machine)]) {
      stream(machine).receive(single_rank() ? output(r, c) : received(r, c), pieces(r).length(c));
    }
  }
  bool first_has_room(std::uint64_t c) const override {
    return single_rank() || c < kSlots || all_drained(c - kSlots);
  }
  bool results_have_room(std::uint64_t) const override { return true; }

  void finish(std::uint64_t c) override {
    const int me = collective_.rank();
    const Pieces mine = pieces(me);
    if (output(me, c) != input_ + mine.begin(c)) {
      collective_.team().copy(output(me, c), input_ + mine.begin(c), mine.length(c));
    }
    if (single_rank()) return;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      const int r = static_cast<int>(i);
      if (r == me) continue;
      const bool local = collective_.topology().is_local(r);
      collective_.team().copy(output(r, c), local ? contribution(r, c) : received(r, c), pieces(r).length(c));
    }
  }

  const std::vector<Part>& outputs_;
  const std::byte* input_;
  const std::size_t step_;
  std::size_t contributions_ = 0;
  std::size_t received_region_ = 0;
  std::size_t remote_ = 0;
  std::vector<std::size_t> index_;  // of remote ranks, among them
};

}  // namespace

void all_gather(CollectiveContext& collective, const std::vector<Part>& outputs, const std::byte* input) {
  const int me = collective.rank();
  const int ranks = collective.size();
  const Part& mine = outputs[static_cast<std::size_t>(me)];
  const CopyOut copy_out(collective, total_bytes(outputs));
  const std::size_t longest = longest_bytes(outputs);
  const Algorithm algorithm = collective.algorithm(Opcode::all_gather, longest);
  if (algorithm == Algorithm::local) {
    collective.engage_team(mine.bytes);
    return copy_out(mine.data, input, mine.bytes);
  }
  if (algorithm == Algorithm::staged) {
    collective.reserve(longest);
    collectives::copy(collective.stage(mine.bytes), input, mine.bytes);
    collective.arrive_and_wait();
    for (int r = 0; r < ranks; ++r) {
      const Part& part = outputs[static_cast<std::size_t>(r)];
      if (r != me) collectives::copy(part.data, collective.staged(r, part.bytes), part.bytes);
    }
    return copy_out(mine.data, input, mine.bytes);
  }
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical) return HierarchicalAllGather(collective, outputs, input).run();
  const std::size_t step = collective.begin_chunks(total_bytes(outputs));
  const std::uint64_t chunks = Pieces{.total = longest, .step = step}.count();
  collective.open_rings(chunks, step);
  for (std::uint64_t i = 0; i <= chunks; ++i) {
    if (i < chunks) {
      const Pieces pieces{.total = mine.bytes, .step = step};
      collective.await_room(i);
      collective.team().copy(collective.chunk(me, i), input + pieces.begin(i), pieces.length(i));
      collective.filled(i);
      copy_out(mine.data + pieces.begin(i), input + pieces.begin(i), pieces.length(i));
    }
    if (i == 0) continue;
    const std::uint64_t c = i - 1;
    for (int k = 1; k < ranks; ++k) {
      const int r = (me + k) % ranks;
      const Part& part = outputs[static_cast<std::size_t>(r)];
      const Pieces pieces{.total = part.bytes, .step = step};
      if (pieces.length(c) == 0) continue;
      collective.await_filled(r, c);
      copy_out.drain(part.data + pieces.begin(c), collective.chunk(r, c), pieces.length(c));
    }
    collective.drained(c);
  }
}

}  // namespace collectives
