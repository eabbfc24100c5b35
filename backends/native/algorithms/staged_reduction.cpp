#include "algorithms/staged_reduction.hpp"

#include <cstddef>

#include "algorithms/machine_partials.hpp"
#include "kernels/kernels.hpp"

namespace collectives {

void reduce_local(void* data, std::size_t count, const Reduction& reduction) {
  if (reduction.op != ReduceOp::premul_sum)
    return;  // every other reduction of one contribution is that contribution
  const void* source = data;
  reduce(data, &source, 1, count, reduction.dtype, reduction.op, reduction.factor);
}

void reduce_staged(CollectiveContext& collective, void* data, std::size_t count, std::size_t bytes,
                   const Reduction& reduction) {
  const void** sources = collective.sources();
  for (int r = 0; r < collective.size(); ++r)
    sources[r] = r == collective.rank() ? data : collective.staged(r, bytes);
  reduce_by_machine(collective.topology(), data, sources, count, reduction);
}

}  // namespace collectives
