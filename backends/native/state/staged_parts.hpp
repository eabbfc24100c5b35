// What the ranks of a group stage where each part of it has one reader.
#pragma once

#include <cstddef>
#include <vector>

namespace collectives {

// Every rank stages a part for each rank, which alone reads it. Ranks that agree about the operation agree
// about the parts.
struct StagedParts {
  std::vector<std::size_t> offsets;      // of the parts, by rank, and the end of the last
  std::vector<const std::byte*> staged;  // by local rank, ascending: where it staged them

  std::size_t length(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    return offsets[r + 1] - offsets[r];
  }
  // Of all parts for these ranks.
  std::size_t length(const std::vector<int>& ranks) const {
    std::size_t sum = 0;
    for (const int rank : ranks) sum += length(rank);
    return sum;
  }
};

}  // namespace collectives
