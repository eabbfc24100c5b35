// Long collectives of a group that spans machines, after the meeting. Arguments as in collectives.hpp.
//
// Bytes that each machine sends, for a message of N bytes on each of m machines: all_reduce 2N(m-1)/m, reduce
// the same with the root's machine as the only receiver of results, broadcast N from the root and
// N(m-2)/(m-1) from each other, all_gather and reduce_scatter each contribution once to each machine that
// needs it, exchanges what goes between ranks. Where a machine has several ranks its contribution to a
// reduction travels as accumulators: twice the bytes for 16-bit floats (kernels/kernels.hpp).
#pragma once

#include <cstddef>
#include <vector>

#include "algorithms/collectives.hpp"
#include "algorithms/round.hpp"

namespace collectives {

// dst = the contributions of all ranks, machine by machine; sources by rank.
void reduce_placed(const Placement& placement, void* dst, const void* const* sources, std::size_t count,
                   const Reduction& reduction);

// `root` -1: the result goes to all.
void reduce_between_machines(Round& round, std::byte* data, std::size_t count, const Reduction& reduction,
                             int root);
void broadcast_between_machines(Round& round, std::byte* data, std::size_t bytes, int root);
void all_gather_between_machines(Round& round, const std::vector<Part>& outputs, const std::byte* input);
void reduce_scatter_between_machines(Round& round, std::byte* output, const std::vector<Part>& parts,
                                     const Reduction& reduction);

// inputs[r] goes to rank r, where it arrives in outputs[rank]; nothing to itself. `longest`: the most that
// one local rank sends another, the same on all ranks of a machine.
void exchange_between_machines(Round& round, const std::vector<Part>& outputs,
                               const std::vector<Part>& inputs, std::size_t longest);

}  // namespace collectives
