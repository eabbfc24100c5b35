// The collective operations over one CollectiveContext each. All ranks call the same one with arguments that
// the context's call describes; memory is dense, counts are elements, byte counts say so. Inputs and outputs
// of one rank do not overlap unless said.
//
// Every function returns when this rank's outputs are complete and its inputs can be reused. Which algorithm
// it takes: selection/selection.hpp.
#pragma once

#include <cstddef>
#include <vector>

#include "algorithms/collective_context.hpp"
#include "algorithms/part.hpp"

namespace collectives {

void barrier(CollectiveContext& collective);

// Result in `output` on every rank; `input` may be that.
void all_reduce(CollectiveContext& collective, std::byte* output, const std::byte* input, std::size_t count,
                const Reduction& reduction);

// Result in `data` on the root; elsewhere `data` is only read.
void reduce_to_root(CollectiveContext& collective, void* data, std::size_t count, const Reduction& reduction,
                    int root);

// parts[r] is this rank's contribution to rank r; `output` receives parts[rank] of all ranks reduced and may
// be that part.
void reduce_scatter(CollectiveContext& collective, std::byte* output, const std::vector<Part>& parts,
                    const Reduction& reduction);

void broadcast(CollectiveContext& collective, std::byte* data, std::size_t bytes, int root);

// outputs[r] receives rank r's input; `input` may be outputs[rank].
void all_gather(CollectiveContext& collective, const std::vector<Part>& outputs, const std::byte* input);

// `outputs` on the root only; `input` may be its outputs[rank].
void gather(CollectiveContext& collective, const std::vector<Part>& outputs, const std::byte* input,
            std::size_t bytes, int root);

// `inputs` on the root only; `output` may be its inputs[rank].
void scatter(CollectiveContext& collective, std::byte* output, std::size_t bytes,
             const std::vector<Part>& inputs, int root);

// inputs[r] goes to rank r, where it arrives in outputs[rank]. Throws ErrorKind::mismatch on every rank where
// some pair of sizes differs.
void all_to_all(CollectiveContext& collective, const std::vector<Part>& outputs,
                const std::vector<Part>& inputs);

}  // namespace collectives
