// The collective operations over one Round each. All ranks call the same one with arguments that the round's
// call describes; memory is dense, counts are elements, byte counts say so. Inputs and outputs of one rank do
// not overlap unless said.
//
// Every function returns when this rank's outputs are complete and its inputs can be reused.
#pragma once

#include <cstddef>
#include <vector>

#include "algorithms/round.hpp"
#include "common/dtype.hpp"

namespace collectives {

struct Reduction {
  DType dtype;
  ReduceOp op;
  double factor;  // divisor of AVG, multiplier of PREMUL_SUM
};

// A part of a list of tensors, or of one tensor that is split.
struct Part {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

void barrier(Round& round);

// Result in `data` on every rank.
void all_reduce(Round& round, void* data, std::size_t count, const Reduction& reduction);

// Result in `data` on the root; elsewhere `data` is only read.
void reduce_to_root(Round& round, void* data, std::size_t count, const Reduction& reduction, int root);

// parts[r] is this rank's contribution to rank r; `output` receives parts[rank] of all ranks reduced and may
// be that part.
void reduce_scatter(Round& round, std::byte* output, const std::vector<Part>& parts,
                    const Reduction& reduction);

void broadcast(Round& round, std::byte* data, std::size_t bytes, int root);

// outputs[r] receives rank r's input; `input` may be outputs[rank].
void all_gather(Round& round, const std::vector<Part>& outputs, const std::byte* input);

// `outputs` on the root only; `input` may be its outputs[rank].
void gather(Round& round, const std::vector<Part>& outputs, const std::byte* input, std::size_t bytes,
            int root);

// `inputs` on the root only; `output` may be its inputs[rank].
void scatter(Round& round, std::byte* output, std::size_t bytes, const std::vector<Part>& inputs, int root);

// inputs[r] goes to rank r, where it arrives in outputs[rank]. Throws ErrorKind::mismatch on every rank where
// some pair of sizes differs.
void all_to_all(Round& round, const std::vector<Part>& outputs, const std::vector<Part>& inputs);

}  // namespace collectives
