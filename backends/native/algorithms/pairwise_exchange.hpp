// gather, scatter and all_to_all of a group that spans machines, after the arrival: what ranks on different
// machines have for each other goes directly, what local ranks have for each other through shared memory
// meanwhile.
#pragma once

#include <cstddef>
#include <vector>

#include "algorithms/collective_context.hpp"
#include "algorithms/part.hpp"

namespace collectives {

// inputs[r] goes to rank r, where it arrives in outputs[rank]; nothing to itself. `longest`: the most that
// one local rank sends another, the same on all ranks of a machine.
void pairwise_exchange(CollectiveContext& collective, const std::vector<Part>& outputs,
                       const std::vector<Part>& inputs, std::size_t longest);

}  // namespace collectives
