// Reductions of one rank, and of contributions that are all staged.
#pragma once

#include <cstddef>

#include "algorithms/collective_context.hpp"
#include "algorithms/part.hpp"

namespace collectives {

// Of one contribution, which `data` holds.
void reduce_local(void* data, std::size_t count, const Reduction& reduction);

// data = the own contribution, which it holds, and those that the other ranks have staged, `bytes` each.
void reduce_staged(CollectiveContext& collective, void* data, std::size_t count, std::size_t bytes,
                   const Reduction& reduction);

}  // namespace collectives
