// NCCL's element types and reductions, on host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nccl_double {

constexpr int kInt8 = 0, kUint8 = 1, kInt32 = 2, kUint32 = 3, kInt64 = 4, kUint64 = 5, kFloat16 = 6,
              kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9, kFloat8e4m3 = 10, kFloat8e5m2 = 11, kTypes = 12;
constexpr int kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4, kBuiltInOps = 5;

std::size_t element_bytes(int type);

// Reduces `inputs`, each of `count` elements, in their order into `output`, which may be one of them. Floats
// of 16 and 8 bits are computed in float and rounded once; an average of integers truncates.
void reduce(int type, int op, const std::vector<const std::byte*>& inputs, std::byte* output,
            std::size_t count);

// Writes `count` elements of `input`, each times the element at `factor`, to `output`.
void multiply(int type, const std::byte* factor, const std::byte* input, std::byte* output,
              std::size_t count);

}  // namespace nccl_double
