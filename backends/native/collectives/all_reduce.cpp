// all_reduce. Staged: every rank stages its contribution and reduces all of them, or those of its machine.
// Staged in parts: it reduces its part of them. Sliced and hierarchical: see the headers of these names in
// algorithms/.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithms/hierarchical_reduction.hpp"
#include "algorithms/machine_chunks.hpp"
#include "algorithms/machine_partials.hpp"
#include "algorithms/sliced_reduction.hpp"
#include "algorithms/staged_partials.hpp"
#include "algorithms/staged_reduction.hpp"
#include "collectives/collectives.hpp"
#include "common/dtype.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

void all_reduce_partials(CollectiveContext& collective, std::byte* data, std::size_t count,
                         const Reduction& reduction) {
  StagedPartials partials(collective, reduction, count,
                          {collective.topology().machines.size(), {{.begin = 0, .length = count}}});
  partials.contribute(data);
  collective.arrive_with(partials);
  partials.combine(data, 0);
}

// `parts`: in bytes, by rank.
void all_reduce_in_parts(CollectiveContext& collective, std::byte* data, const Pieces& parts,
                         const Reduction& reduction) {
  const std::size_t element = size_of(reduction.dtype);
  const auto ranks = static_cast<std::uint64_t>(collective.size());
  std::vector<std::size_t> lengths;
  std::vector<StagedPartials::Range> ranges;
  for (std::uint64_t r = 0; r < ranks; ++r) {
    lengths.push_back(parts.length(r));
    ranges.push_back({.begin = parts.begin(r) / element, .length = parts.length(r) / element});
  }
  StagedPartials partials(collective, reduction, parts.total / element,
                          StagedPartials::by_machine(collective.topology(), ranges));
  partials.contribute(data);
  collective.arrive_with(partials);
  partials.combine(collective.result(collective.rank()),
                   local_index(collective.topology(), collective.rank()));
  collective.exchange_results(lengths);
  for (std::uint64_t r = 0; r < ranks; ++r)
    collectives::copy(data + parts.begin(r), collective.result(static_cast<int>(r)), parts.length(r));
}

}  // namespace

void all_reduce(CollectiveContext& collective, void* data, std::size_t count, const Reduction& reduction) {
  const Topology& topology = collective.topology();
  const std::size_t element = size_of(reduction.dtype);
  const std::size_t bytes = count * element;
  const std::size_t width = widest_between(topology, reduction);
  const Pieces parts = split_evenly(bytes, as_index(collective.size()));
  const std::size_t for_machine = parts.step / element * width * largest_machine(topology);
  const Algorithm algorithm = collective.algorithm(Opcode::all_reduce, count * width, for_machine);
  auto* const tensor = static_cast<std::byte*>(data);
  if (algorithm == Algorithm::local) return reduce_local(data, count, reduction);
  if (algorithm == Algorithm::staged) {
    if (collective.sends_partials()) return all_reduce_partials(collective, tensor, count, reduction);
    collective.reserve(bytes);
    collectives::copy(collective.stage(bytes), data, bytes);
    collective.arrive_and_wait();
    return reduce_staged(collective, data, count, bytes, reduction);
  }
  if (algorithm == Algorithm::staged_in_parts)
    return all_reduce_in_parts(collective, tensor, parts, reduction);
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical)
    return hierarchical_all_reduce(collective, tensor, count, reduction);
  sliced_all_reduce(collective, tensor, count, reduction);
}

}  // namespace collectives
