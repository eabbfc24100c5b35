// broadcast. Staged: the root stages, the others copy. Chunked: the root fills chunks of its ring, the others
// drain them. Hierarchical: the root's machine scatters shares of each chunk to the others, which all-gather
// them.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/pipeline.hpp"
#include "collectives/collectives.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// The root deals shares to the other machines, which pass them on to each other. The root's machine takes
// them from the root's region, every other one from its gateways'.
class HierarchicalBroadcast final : public Pipeline {
 public:
  HierarchicalBroadcast(CollectiveContext& collective, std::byte* data, std::size_t bytes, int root)
      : Pipeline(collective, channels_of(collective.topology()),
                 Pieces{.total = bytes, .step = moved_chunk(bytes)}.count(),
                 {.fills = collective.topology().is_local(root),
                  .two_phases = true,
                  .lag = collective.topology().is_local(root) ? kSlots - 1 : 0,
                  .depth = one_rank_per_machine(collective.topology()) ? kDepth : kSlots / 2}),
        data_(data),
        chunks_{.total = bytes, .step = moved_chunk(bytes)},
        source_(as_index(collective.topology().of(root))),
        root_(root) {
    collective.engage_team(bytes);
    if (!single_rank()) region_ = collective.open_region(kSlots * chunks_.step);
  }

 private:
  bool is_source() const { return as_index(machine_) == source_; }
  Pieces shares(std::uint64_t c) const { return split_evenly(chunks_.length(c), machines() - 1); }
  // Which share a machine other than the root's passes on.
  std::size_t share_of(std::size_t machine) const { return machine < source_ ? machine : machine - 1; }
  std::byte* place(std::uint64_t c, std::size_t at) const {
    if (single_rank()) return data_ + chunks_.begin(c) + at;
    const std::uint64_t slot = is_source() ? c % kSlots : turn(c) % kSlots;
    return collective_.region(is_source() ? root_ : gateway(c), region_) + slot * chunks_.step + at;
  }

  void fill(std::uint64_t c) override {
    if (collective_.rank() == root_)
      collective_.team().copy(place(c, 0), data_ + chunks_.begin(c), chunks_.length(c));
  }

  bool results_have_room(std::uint64_t c) const override {
    const std::uint64_t slots = result_slots();
    return single_rank() || is_source() || c < slots ||
           (all_drained(c - slots) && second_has_left(c - slots));
  }
  bool first_has_room(std::uint64_t c) const override { return results_have_room(c); }

  void send_first(std::uint64_t c, int machine) override {
    if (!is_source()) return;
    const Pieces parts = shares(c);
    const std::size_t theirs = share_of(as_index(machine));
    stream(machine).send(place(c, parts.begin(theirs)), parts.length(theirs));
  }
  void receive_first(std::uint64_t c, int machine) override {
    if (as_index(machine) != source_) return;
    const Pieces parts = shares(c);
    const std::size_t mine = share_of(as_index(machine_));
    stream(machine).receive(place(c, parts.begin(mine)), parts.length(mine));
  }
  void send_second(std::uint64_t c, int machine) override {
    if (is_source() || as_index(machine) == source_) return;
    const Pieces parts = shares(c);
    const std::size_t mine = share_of(as_index(machine_));
    stream(machine).send(place(c, parts.begin(mine)), parts.length(mine));
  }
  void receive_second(std::uint64_t c, int machine) override {
    if (is_source() || as_index(machine) == source_) return;
    const Pieces parts = shares(c);
    const std::size_t theirs = share_of(as_index(machine));
    stream(machine).receive(place(c, parts.begin(theirs)), parts.length(theirs));
  }
  void finish(std::uint64_t c) override {
    if (single_rank() || collective_.rank() == root_) return;
    collective_.team().copy(data_ + chunks_.begin(c), place(c, 0), chunks_.length(c));
  }

  std::byte* data_;
  const Pieces chunks_;
  const std::size_t source_;  // the root's machine
  const int root_;
  std::size_t region_ = 0;
};

}  // namespace

void broadcast(CollectiveContext& collective, std::byte* data, std::size_t bytes, int root) {
  const Algorithm algorithm = collective.algorithm(Opcode::broadcast, bytes);
  if (algorithm == Algorithm::local) return;
  const bool sends = collective.rank() == root;
  if (algorithm == Algorithm::staged) {
    collective.reserve(bytes);
    if (sends) collectives::copy(collective.stage(bytes), data, bytes);
    collective.arrive_and_wait();
    if (!sends) collectives::copy(data, collective.staged(root, bytes), bytes);
    return;
  }
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical) return HierarchicalBroadcast(collective, data, bytes, root).run();
  const Pieces pieces{.total = bytes, .step = collective.begin_chunks(bytes)};
  collective.open_rings(pieces.count(), pieces.step);
  const CopyOut copy_out(collective, bytes);
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (sends) {
      collective.await_room(c);
      collective.team().copy(collective.chunk(root, c), data + pieces.begin(c), pieces.length(c));
      collective.filled(c);
    } else {
      collective.await_filled(root, c);
      copy_out.drain(data + pieces.begin(c), collective.chunk(root, c), pieces.length(c));
      collective.drained(c);
    }
  }
}

}  // namespace collectives
