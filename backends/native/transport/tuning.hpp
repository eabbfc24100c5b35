// Thresholds that decide how an operation is carried out: never what its result is, bit for bit.
//
// The rank that makes the segment decides them and hands them over in its header, because ranks that took
// different ways would wait for each other for ever. Defaults depend on the number of ranks alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace collectives {

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

  bool operator==(const Tuning&) const = default;
};

// A field, what it may be, and what it means.
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

// Says which field has a value that it may not have; empty where all is well.
std::string complaint_about(const Tuning& tuning);

}  // namespace collectives
