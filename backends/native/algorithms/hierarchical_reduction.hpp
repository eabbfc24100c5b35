// all_reduce and reduce of long messages between machines.
//
// Bytes that each of m machines sends for a message of N bytes: all_reduce 2N(m-1)/m; reduce the same, with
// the root's machine as the only receiver of results. Where a machine has more than one rank its contribution
// travels as accumulators: twice the bytes for 16-bit floats.
#pragma once

#include <cstddef>

#include "algorithms/collective_context.hpp"
#include "algorithms/part.hpp"

namespace collectives {

void hierarchical_all_reduce(CollectiveContext& collective, std::byte* data, std::size_t count,
                             const Reduction& reduction);
// Result in `data` on the root; elsewhere `data` is only read.
void hierarchical_reduce(CollectiveContext& collective, std::byte* data, std::size_t count,
                         const Reduction& reduction, int root);

}  // namespace collectives
