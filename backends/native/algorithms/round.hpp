// One collective on its way: staging, meeting, and the chunk counters of long messages.
//
// Every collective begins with a *meeting*: each rank publishes its arrival line and waits for everyone's.
// The lines carry what the operation is, so that ranks that disagree all notice, before any of them has
// written an output. Short contributions are *staged* before the meeting, in the line itself or in a slot,
// and read right after it: one synchronisation in all.
//
// Long messages follow the meeting. They go through the ranks' *rings* in *chunks*, numbered from 0 in each
// operation. A rank has *filled* a chunk when its part can be read, *reduced* it when its slice holds
// results, *drained* it when it has read all it needs of it from every ring. The ring position of chunk c is
// free once everyone who reads it has drained chunk c - ring_chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/station.hpp"

namespace collectives {

class Round {
 public:
  // `sources` is scratch space for one pointer a rank.
  Round(Station& station, const Call& call, std::vector<const void*>& sources)
      : station_(station), call_(call), sources_(sources) {}

  int rank() const noexcept { return station_.rank(); }
  int size() const noexcept { return station_.size(); }
  const Call& call() const noexcept { return call_; }
  const void** sources() const noexcept { return sources_.data(); }

  std::size_t slot_bytes() const noexcept { return station_.shape().slot_bytes; }
  std::size_t chunk_bytes() const noexcept { return station_.shape().chunk_bytes; }

  // Where this rank stages `bytes` (at most `slot_bytes`) before the meeting, and where a peer's are after
  // it.
  std::byte* stage(std::size_t bytes) const noexcept { return place(rank(), bytes); }
  const std::byte* staged(int peer, std::size_t bytes) const noexcept { return place(peer, bytes); }

  // The numbers of `Station::splits`: this rank's before the meeting, a peer's after it.
  std::uint64_t* splits(int peer) const noexcept { return station_.splits(peer, call_.sequence); }

  // Publishes this rank's arrival and waits for all ranks'. Throws ErrorKind::mismatch, on every rank alike,
  // where they differ.
  void meet();

  // Throws ErrorKind::mismatch with the table of all ranks' operations. All ranks must come to the same
  // conclusion.
  [[noreturn]] void mismatch(const std::string& difference) const;

  std::byte* chunk(int peer, std::uint64_t index) const noexcept { return station_.chunk(peer, index); }

  void filled(std::uint64_t chunk) { station_.publish(station_.own().progress.filled, mark(chunk)); }
  void reduced(std::uint64_t chunk) { station_.publish(station_.own().progress.reduced, mark(chunk)); }
  void drained(std::uint64_t chunk) { station_.publish(station_.own().progress.drained, mark(chunk)); }

  void await_filled(int peer, std::uint64_t chunk) {
    station_.await(call_, peer, station_.page(peer).progress.filled, mark(chunk));
  }
  void await_reduced(int peer, std::uint64_t chunk) {
    station_.await(call_, peer, station_.page(peer).progress.reduced, mark(chunk));
  }
  // Until `reader` leaves room for `chunk` in this rank's ring.
  void await_room(int reader, std::uint64_t chunk) {
    if (chunk < station_.shape().ring_chunks) return;
    station_.await(call_, reader, station_.page(reader).progress.drained,
                   mark(chunk - station_.shape().ring_chunks));
  }
  void await_room(std::uint64_t chunk) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) await_room(r, chunk);
    }
  }

 private:
  static constexpr unsigned kChunkBits = 24;

  std::uint64_t mark(std::uint64_t chunk) const noexcept {
    return (call_.sequence << kChunkBits) + chunk + 1;
  }
  std::byte* place(int peer, std::size_t bytes) const noexcept {
    return bytes <= kInlineBytes ? station_.arrival(peer, call_.sequence).payload
                                 : station_.slot(peer, call_.sequence);
  }

  Station& station_;
  const Call& call_;
  std::vector<const void*>& sources_;
};

// The pieces of a range that goes through the rings `step` at a time.
struct Pieces {
  std::size_t total;
  std::size_t step;

  std::uint64_t count() const noexcept { return (total + step - 1) / step; }
  std::size_t begin(std::uint64_t piece) const noexcept { return std::min(total, piece * step); }
  std::size_t length(std::uint64_t piece) const noexcept { return begin(piece + 1) - begin(piece); }
};

// Where slices of a chunk begin, so that no two ranks write one line.
inline constexpr std::size_t kSliceAlignment = 64;

constexpr std::size_t round_up(std::size_t value, std::size_t step) noexcept {
  return (value + step - 1) / step * step;
}
constexpr std::size_t round_down(std::size_t value, std::size_t step) noexcept { return value / step * step; }

}  // namespace collectives
