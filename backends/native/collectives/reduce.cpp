// reduce. Staged: the others stage, the root reduces all contributions, or those of machines. Sliced and
// hierarchical: see the headers of these names in algorithms/.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/hierarchical_reduction.hpp"
#include "algorithms/machine_partials.hpp"
#include "algorithms/sliced_reduction.hpp"
#include "algorithms/staged_partials.hpp"
#include "collectives/collectives.hpp"
#include "common/codes.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

// Of two ranks: the other one fills chunks of its ring, the root reduces them with its tensor.
void root_reduce(CollectiveContext& collective, std::byte* data, std::size_t bytes,
                 const Reduction& reduction, int root) {
  const int other = 1 - root;
  const std::size_t element = size_of(reduction.dtype);
  const Pieces pieces{.total = bytes, .step = collective.begin_chunks(bytes)};
  collective.open_rings(pieces.count(), pieces.step);
  const void** sources = collective.sources();
  for (std::uint64_t c = 0; c < pieces.count(); ++c) {
    if (collective.rank() == other) {
      collective.await_room(root, c);
      collective.team().copy(collective.chunk(other, c), data + pieces.begin(c), pieces.length(c));
      collective.filled(c);
      continue;
    }
    collective.await_filled(other, c);
    sources[root] = data + pieces.begin(c);
    sources[other] = collective.chunk(other, c);
    // The result is of no use in the ring, but storing it takes over the cache lines: see
    // common/cache_line.hpp.
    collective.team().reduce(data + pieces.begin(c), sources, 2, pieces.length(c) / element, reduction,
                             {.second = collective.chunk(other, c)});
    collective.drained(c);
  }
}

void reduce_partials(CollectiveContext& collective, std::byte* data, std::size_t count,
                     const Reduction& reduction, int root) {
  const Topology& topology = collective.topology();
  std::vector<std::vector<StagedPartials::Range>> needed(topology.machines.size());
  needed[as_index(topology.of(root))].push_back({.begin = 0, .length = count});
  StagedPartials partials(collective, reduction, count, std::move(needed));
  partials.contribute(data);
  collective.arrive_with(partials);
  if (collective.rank() == root) partials.combine(data, 0);
}

}  // namespace

void reduce_to_root(CollectiveContext& collective, void* data, std::size_t count, const Reduction& reduction,
                    int root) {
  const Topology& topology = collective.topology();
  const std::size_t bytes = count * size_of(reduction.dtype);
  const Algorithm algorithm =
      collective.algorithm(Opcode::reduce, count * widest_between(topology, reduction));
  auto* const tensor = static_cast<std::byte*>(data);
  if (algorithm == Algorithm::local) {
    collective.engage_team(bytes);
    return reduce_local(collective, tensor, count, reduction);
  }
  if (algorithm == Algorithm::staged) {
    if (collective.sends_partials()) return reduce_partials(collective, tensor, count, reduction, root);
    collective.reserve(bytes);
    if (collective.rank() != root) collectives::copy(collective.stage(bytes), data, bytes);
    collective.arrive_and_wait();
    if (collective.rank() == root) reduce_staged(collective, data, count, bytes, reduction);
    return;
  }
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical)
    return hierarchical_reduce(collective, tensor, count, reduction, root);
  if (algorithm == Algorithm::root_reduces) return root_reduce(collective, tensor, bytes, reduction, root);
  sliced_reduce(collective, tensor, count, reduction, root);
}

}  // namespace collectives
