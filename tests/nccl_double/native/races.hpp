// Finds accesses to memory that nothing orders, however the streams happen to run.
//
// Each stream, each node of a graph, each operation of a launch and each thread of the host is a sequence of
// accesses. A clock says up to which access of every sequence another access comes behind: events, the order
// of streams and graphs, and calls that block the host carry clocks on. Two accesses to the same byte, one of
// which writes, are a race where neither's clock reaches the other (FastTrack, Flanagan and Freund 2009).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace nccl_double {

// By sequence, the number of the last access that is done before.
using Clock = std::map<std::intptr_t, std::uint64_t>;

void join(Clock& into, const Clock& from);

struct Range {
  std::uintptr_t begin;
  std::uintptr_t end;
  bool writes;
};

// What an operation reads and writes, and its name in a report.
struct Accesses {
  std::string what;
  std::vector<Range> ranges;
};

inline Range reads(const void* from, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(from);
  return {begin, begin + bytes, false};
}

inline Range writes(const void* to, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(to);
  return {begin, begin + bytes, true};
}

// Begins to look for races, knowing of no access, or ends it.
void watch_accesses(bool on);

// A sequence that nobody has.
std::intptr_t new_sequence();

// The clock of what the stream holds, and of what this thread has waited for.
Clock clock_of(std::intptr_t stream);

// Puts later accesses of the stream behind a clock. Stream 0 is the calling thread.
void follow(std::intptr_t stream, const Clock& clock);

// Puts later accesses of all threads behind a clock.
void follow_everywhere(const Clock& clock);

// A place in a sequence, and the clock behind it.
struct Place {
  std::intptr_t sequence = 0;
  std::uint64_t number = 0;  // 0 where nobody looks for races
  std::uint64_t life = 0;    // which time it is that somebody does
  std::shared_ptr<const Clock> clock;
};

// Notes accesses of operations that start together, behind all that the stream holds; of stream 0 those that
// this thread makes at once. Returns the place of the last.
Place access(std::intptr_t stream, const std::vector<Accesses>& operations);

// Notes accesses of a sequence that is behind a clock; returns their place.
Place access_behind(Clock clock, std::intptr_t sequence, const Accesses& accesses);

// Notes accesses that become known while the operation at a place is carried out.
void access_at(const Place& place, const Accesses& accesses);

// Forgets the accesses to memory that has been given out anew.
void forget_accesses(std::uintptr_t begin, std::uintptr_t end);

// Notes that this thread has given memory back. Who gets it next may write to it behind what the streams hold
// now: the one that it was given out for, and those that the allocator was told of.
void give_back(const std::vector<std::intptr_t>& streams, const Accesses& accesses);

// Returns the races that were found and not returned before, a line each; the first few in words.
std::string take_races();

}  // namespace nccl_double
