// all_reduce. Staged: every rank stages its contribution and reduces all of them. Sliced and hierarchical:
// see the headers of these names in algorithms/.
#include <cstddef>

#include "algorithms/hierarchical_reduction.hpp"
#include "algorithms/sliced_reduction.hpp"
#include "algorithms/staged_reduction.hpp"
#include "collectives/collectives.hpp"
#include "common/dtype.hpp"
#include "kernels/kernels.hpp"

namespace collectives {

void all_reduce(CollectiveContext& collective, void* data, std::size_t count, const Reduction& reduction) {
  const std::size_t bytes = count * size_of(reduction.dtype);
  const Algorithm algorithm = collective.algorithm(Opcode::all_reduce, bytes);
  if (algorithm == Algorithm::local) return reduce_local(data, count, reduction);
  if (algorithm == Algorithm::staged) {
    collective.reserve(bytes);
    collectives::copy(collective.stage(bytes), data, bytes);
    collective.arrive_and_wait();
    return reduce_staged(collective, data, count, bytes, reduction);
  }
  collective.arrive_and_wait();
  auto* const tensor = static_cast<std::byte*>(data);
  if (algorithm == Algorithm::hierarchical)
    return hierarchical_all_reduce(collective, tensor, count, reduction);
  sliced_all_reduce(collective, tensor, count, reduction);
}

}  // namespace collectives
