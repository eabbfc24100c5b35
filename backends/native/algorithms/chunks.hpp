// How a range is cut into pieces, messages between machines into chunks, and which rank acts for a machine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/control_page.hpp"
#include "state/topology.hpp"

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

inline constexpr std::size_t kLeastChunk = 64 << 10;
inline constexpr std::size_t kMostChunk = 256 << 10;
// Chunks that a message should have, so that the stages overlap.
inline constexpr std::size_t kChunksWanted = 8;

inline std::size_t as_index(int number) { return static_cast<std::size_t>(number); }

// Ranks of the smallest and of the largest machine.
inline bool has_fewer(const std::vector<int>& one, const std::vector<int>& other) {
  return one.size() < other.size();
}
inline std::size_t smallest_machine(const Topology& topology) {
  return std::min_element(topology.machines.begin(), topology.machines.end(), has_fewer)->size();
}
inline std::size_t largest_machine(const Topology& topology) {
  return std::max_element(topology.machines.begin(), topology.machines.end(), has_fewer)->size();
}

// Channels in which every rank of the smallest machine is a gateway: gateways by channel and machine.
inline std::vector<std::vector<int>> channels_of(const Topology& topology) {
  std::vector<std::vector<int>> gateways(smallest_machine(topology));
  for (std::size_t channel = 0; channel < gateways.size(); ++channel) {
    for (const auto& machine : topology.machines) gateways[channel].push_back(machine[channel]);
  }
  return gateways;
}

inline bool one_rank_per_machine(const Topology& topology) {
  return topology.count() == static_cast<int>(topology.machine_of.size());
}

// Of this rank, among the ranks of its machine.
inline std::size_t local_index(const Topology& topology, int rank) {
  const std::vector<int>& local = topology.local();
  return static_cast<std::size_t>(std::find(local.begin(), local.end(), rank) - local.begin());
}

inline bool has_one_rank(const Topology& topology, std::size_t machine) {
  return topology.machines[machine].size() == 1;
}

// `total` in as many parts of equal length, each but the last a multiple of a cache line.
inline Pieces split_evenly(std::size_t total, std::size_t parts) {
  return {.total = total, .step = round_up((total + parts - 1) / parts, kSliceAlignment)};
}

// Bytes of a chunk of a message that is not reduced.
inline std::size_t moved_chunk(std::size_t bytes) {
  return round_up(std::clamp(bytes / kChunksWanted, kLeastChunk, kMostChunk), kPage);
}

// As much of `wanted` as there is room for, a multiple of kSliceAlignment where that can be. With many ranks
// there is less room for each, and neighbours' pieces share a line.
inline std::size_t fitted_piece(std::size_t wanted, std::size_t room) {
  const std::size_t most = std::min(wanted, room);
  return std::max<std::size_t>(most < kSliceAlignment ? most : round_down(most, kSliceAlignment), 1);
}

}  // namespace collectives
