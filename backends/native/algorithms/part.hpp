// The tensors of a collective: parts of memory, by rank.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "common/codes.hpp"

namespace collectives {

// One tensor of a list, or one rank's part of a tensor that is split.
struct Part {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

inline std::size_t total_bytes(const std::vector<Part>& parts) {
  std::size_t total = 0;
  for (const Part& part : parts) total += part.bytes;
  return total;
}

inline std::size_t longest_bytes(const std::vector<Part>& parts) {
  std::size_t longest = 0;
  for (const Part& part : parts) longest = std::max(longest, part.bytes);
  return longest;
}

struct Reduction {
  DType dtype;
  ReduceOp op;
  double factor;  // divisor of AVG, multiplier of PREMUL_SUM
};

}  // namespace collectives
