// How a range is cut into pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace collectives {

// The pieces of a range that goes through the rings `step` at a time.
struct Pieces {
  std::size_t total;
  std::size_t step;

  std::uint64_t count() const noexcept { return (total + step - 1) / step; }
  std::size_t begin(std::uint64_t piece) const noexcept { return std::min(total, piece * step); }
  std::size_t length(std::uint64_t piece) const noexcept { return begin(piece + 1) - begin(piece); }
};

// Where slices of a chunk begin, so that no two ranks write one cache line.
inline constexpr std::size_t kSliceAlignment = 64;

constexpr std::size_t round_up(std::size_t value, std::size_t step) noexcept {
  return (value + step - 1) / step * step;
}
constexpr std::size_t round_down(std::size_t value, std::size_t step) noexcept { return value / step * step; }

}  // namespace collectives
