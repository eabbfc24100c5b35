// all_reduce. Staged: every rank stages its contribution and reduces all of them. Staged in parts: it reduces
// its part of them. Sliced and hierarchical: see the headers of these names in algorithms/.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "algorithms/hierarchical_reduction.hpp"
#include "algorithms/machine_chunks.hpp"
#include "algorithms/machine_partials.hpp"
#include "algorithms/sliced_reduction.hpp"
#include "algorithms/staged_reduction.hpp"
#include "collectives/collectives.hpp"
#include "common/dtype.hpp"
#include "kernels/kernels.hpp"

namespace collectives {
namespace {

void all_reduce_in_parts(CollectiveContext& collective, std::byte* data, const Pieces& parts,
                         const Reduction& reduction) {
  const auto ranks = static_cast<std::uint64_t>(collective.size());
  const std::byte* own = data;
  if (collective.topology().local().size() > 1) {
    std::byte* stage = collective.stage_parts(parts.total);
    collectives::copy(stage, data, parts.total);
    own = stage;
  }
  std::vector<std::size_t> offsets;
  for (std::uint64_t r = 0; r <= ranks; ++r) offsets.push_back(parts.begin(r));
  collective.arrive_with_parts(std::move(offsets), own);
  const void** sources = collective.sources();
  for (int r = 0; r < collective.size(); ++r) sources[r] = collective.part_of(r);
  const std::size_t mine = parts.length(static_cast<std::uint64_t>(collective.rank()));
  reduce_by_machine(collective.topology(), collective.result(collective.rank()), sources,
                    mine / size_of(reduction.dtype), reduction);
  collective.exchange_results();
  for (std::uint64_t r = 0; r < ranks; ++r)
    collectives::copy(data + parts.begin(r), collective.result(static_cast<int>(r)), parts.length(r));
}

}  // namespace

void all_reduce(CollectiveContext& collective, void* data, std::size_t count, const Reduction& reduction) {
  const std::size_t bytes = count * size_of(reduction.dtype);
  const Pieces parts = split_evenly(bytes, static_cast<std::size_t>(collective.size()));
  const Algorithm algorithm =
      collective.algorithm(Opcode::all_reduce, bytes, parts.step * largest_machine(collective.topology()));
  if (algorithm == Algorithm::local) return reduce_local(data, count, reduction);
  if (algorithm == Algorithm::staged) {
    collective.reserve(bytes);
    collectives::copy(collective.stage(bytes), data, bytes);
    collective.arrive_and_wait();
    return reduce_staged(collective, data, count, bytes, reduction);
  }
  auto* const tensor = static_cast<std::byte*>(data);
  if (algorithm == Algorithm::staged_in_parts)
    return all_reduce_in_parts(collective, tensor, parts, reduction);
  collective.arrive_and_wait();
  if (algorithm == Algorithm::hierarchical)
    return hierarchical_all_reduce(collective, tensor, count, reduction);
  sliced_all_reduce(collective, tensor, count, reduction);
}

}  // namespace collectives
