// The thresholds by which ranks choose how to carry out a collective, and how long they wait before they
// sleep. They never change a result.
//
// One rank decides them for all; the leader of each machine hands them over in its segment's header, because
// ranks that chose differently would wait for each other for ever. Defaults depend on the number of ranks
// alone (thresholds.cpp); the table in tuning.cpp has the bounds. Which algorithm each threshold selects:
// selection/selection.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace collectives {

inline constexpr std::uint64_t kKiB = 1 << 10;
inline constexpr std::uint64_t kMiB = 1 << 20;

struct Tuning {
  std::uint64_t one_shot_bytes;
  std::uint64_t staged_bytes;
  std::uint64_t chunk_bytes;
  std::uint64_t unsplit_bytes;
  std::uint64_t shortest_chunk_bytes;
  std::uint64_t chunks_wanted;
  std::uint64_t ring_bytes;
  std::uint64_t past_cache_bytes;
  std::uint64_t spin_us;
  std::uint64_t background_spin_us;
  std::uint64_t yields;
  // Of the rank that has the most, for a long message: ranks cut it alike. Not in the table: it comes of the
  // ranks' cores, not of a file.
  std::uint64_t threads = 1;

  bool operator==(const Tuning&) const = default;
};

// A field, its bounds, and what it means.
struct TuningField {
  const char* name;
  std::uint64_t Tuning::* value;
  std::uint64_t least;
  std::uint64_t most;
  std::uint64_t unit;  // the value is a multiple of it
  const char* meaning;
};

std::span<const TuningField> tuning_fields() noexcept;

Tuning default_tuning(int size);

// The thresholds of a group that spans machines: what is staged is sent to the other machines and must fit a
// staging slot, which replaces both thresholds of staging.
Tuning tuning_between_machines(Tuning tuning, std::uint64_t slot_bytes);

// Says which field is out of its bounds; empty where none is.
std::string complaint_about(const Tuning& tuning);

}  // namespace collectives
