// One collective on its way: staging, meeting, and the chunk counters of long messages.
//
// Every collective begins with a *meeting*: each rank publishes its arrival line and waits for everyone's.
// The lines carry what the operation is, so that ranks that disagree all notice, before any of them has
// written an output. That holds for the ranks of all machines. Short contributions are *staged* before the
// meeting and read right after it: one synchronisation in all.
//
// Long messages follow the meeting. They go through the ranks' *rings* in *chunks*, numbered from 0 in each
// operation. A rank has *filled* a chunk when its part can be read, *reduced* it when its slice holds
// results, *drained* it when it has read all it needs of it from every ring. The ring position of chunk c is
// free once everyone who reads it has drained the chunk that was there before.
//
// A rank stages in its arrival line, in its near slot, or in a *window* of its *arena*, by size. Rings are
// windows too. Windows move through the arena from operation to operation, because a line that its reader's
// core still caches is slow to write, and one that its writer's core has not yet evicted is slow to read:
// with a window in one place both would always be so (measured: 35 us instead of 14 for 256 KiB between two
// cores). All ranks reserve the same windows, so each knows where the others' are. What an operation stages
// overwrites nothing that the operation before it may still read, because both fit into the arena; what was
// there earlier nobody reads any more, as everyone has met since.
//
// The *standing* window of a group of two stays where it is, at the end of the arena, and holds its rings.
// Whoever reads a line there also writes it, a result or what it holds anyway: the line is the reader's alone
// then, and its next writer gets it at once (common/lines.hpp), so that a ring may be short enough to
// stay in the cores' own caches (measured: 13 us instead of 17 for 256 KiB). Where several ranks read a line
// none may do that. Nobody fills a ring before the meeting, when all are done with the operation before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/kernels.hpp"
#include "transport/station.hpp"

namespace collectives {

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

class Streams;

class Round {
 public:
  // `sources` is scratch space for one pointer a rank; `streams` may be null on one machine.
  Round(Station& station, const Call& call, std::vector<const void*>& sources, Streams* streams)
      : station_(station),
        call_(call),
        sources_(sources),
        streams_(streams),
        position_(station.arena_position()) {}
  // To be called once the operation is done. One that failed has left everything as it was.
  void close() { station_.set_arena_position(position_); }

  int rank() const noexcept { return station_.rank(); }
  int size() const noexcept { return station_.size(); }
  const Call& call() const noexcept { return call_; }
  const void** sources() const noexcept { return sources_.data(); }
  Station& station() const noexcept { return station_; }
  const Placement& placement() const noexcept { return station_.placement(); }
  Streams& streams() const noexcept { return *streams_; }
  const Tuning& tuning() const noexcept { return station_.tuning(); }

  // Reserves room for contributions of up to `bytes`. All ranks name the same number.
  void reserve(std::size_t bytes) {
    if (bytes > station_.shape().near_bytes) window_ = next_window(bytes);
  }
  // Where this rank stages `bytes` before the meeting, and where a peer's are after it. No more than was
  // reserved.
  std::byte* stage(std::size_t bytes) noexcept {
    staged_ = bytes;
    return place(rank(), bytes);
  }
  const std::byte* staged(int peer, std::size_t bytes) const noexcept { return place(peer, bytes); }

  // The numbers of `Station::splits`: this rank's before the meeting, a peer's after it.
  std::uint64_t* splits(int peer) const noexcept { return station_.splits(peer, call_.sequence); }

  // Publishes this rank's arrival and waits for all ranks'. Throws ErrorKind::mismatch, on every rank alike,
  // where they differ.
  void meet();

  // Throws ErrorKind::mismatch with the table of all ranks' operations. All ranks must come to the same
  // conclusion.
  [[noreturn]] void mismatch(const std::string& difference) const;

  // Chunks of a ring that is to stay in the cores' own caches.
  static constexpr std::uint64_t kFewChunks = 4;

  // Reserves the rings, for `chunks` chunks of at most `chunk_bytes`, as long as the table allows and no
  // longer than `longest` chunks. All ranks name the same numbers, after the meeting.
  void open_rings(std::uint64_t chunks, std::size_t chunk_bytes,
                  std::uint64_t longest = std::numeric_limits<std::uint64_t>::max()) {
    const bool stands = station_.shape().standing_bytes > 0;
    chunk_bytes_ = chunk_bytes;
    ring_chunks_ = std::clamp<std::uint64_t>(
        chunks, 1, std::min({tuning().ring_bytes / chunk_bytes, longest, stands ? kFewChunks : longest}));
    ring_ = stands ? moving_bytes() : next_window(ring_chunks_ * chunk_bytes);
  }
  // Bytes of a piece of a chunk that holds one for each rank, at equal distances.
  std::size_t piece_bytes() const noexcept {
    return std::max(round_down(tuning().chunk_bytes / static_cast<std::size_t>(size()), kSliceAlignment),
                    kSliceAlignment);
  }
  std::byte* chunk(int peer, std::uint64_t index) const noexcept {
    return station_.arena(peer) + ring_ + (index % ring_chunks_) * chunk_bytes_;
  }

  // Reserves a part of every local rank's arena as long as the operation lasts; returns its offset. All ranks
  // of a machine name the same number, after the meeting.
  std::size_t open_window(std::size_t bytes) {
    if (bytes > moving_bytes()) [[unlikely]]
      too_long_for_arena();
    return next_window(bytes);
  }
  std::byte* window(int peer, std::size_t offset) const noexcept { return station_.arena(peer) + offset; }

  // The words of `Progress`: whether a rank's has reached a chunk, and waiting for that.
  using Word = std::atomic<std::uint64_t> Progress::*;
  void publish(Word word, std::uint64_t chunk) {
    station_.publish(station_.own().progress.*word, mark(chunk));
  }
  bool has(int peer, Word word, std::uint64_t chunk) const noexcept {
    return (station_.page(peer).progress.*word).load(std::memory_order_acquire) >= mark(chunk);
  }
  void await(int peer, Word word, std::uint64_t chunk) {
    station_.await(call_, Station::Wait::work, peer, station_.page(peer).progress.*word, mark(chunk));
  }

  void filled(std::uint64_t chunk) { station_.publish(station_.own().progress.filled, mark(chunk)); }
  void reduced(std::uint64_t chunk) { station_.publish(station_.own().progress.reduced, mark(chunk)); }
  void drained(std::uint64_t chunk) { station_.publish(station_.own().progress.drained, mark(chunk)); }

  void await_filled(int peer, std::uint64_t chunk) {
    station_.await(call_, Station::Wait::work, peer, station_.page(peer).progress.filled, mark(chunk));
  }
  void await_reduced(int peer, std::uint64_t chunk) {
    station_.await(call_, Station::Wait::work, peer, station_.page(peer).progress.reduced, mark(chunk));
  }
  // Until `reader` leaves room for `chunk` in this rank's ring.
  void await_room(int reader, std::uint64_t chunk) {
    if (chunk < ring_chunks_) return;
    station_.await(call_, Station::Wait::work, reader, station_.page(reader).progress.drained,
                   mark(chunk - ring_chunks_));
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
    if (bytes <= kInlineBytes) return station_.arrival(peer, call_.sequence).payload;
    if (bytes <= station_.shape().near_bytes) return station_.near_slot(peer, call_.sequence);
    return station_.arena(peer) + window_;
  }
  [[noreturn]] void too_long_for_arena() const;
  // The part of the arena through which windows move.
  std::size_t moving_bytes() const noexcept {
    return station_.shape().arena_bytes - station_.shape().standing_bytes;
  }
  // The offset in the arena of a window that does not wrap.
  std::size_t next_window(std::size_t bytes) noexcept {
    const std::size_t arena = moving_bytes();
    const std::size_t length = (bytes + kLine - 1) / kLine * kLine;
    if (position_ % arena + length > arena) position_ = (position_ / arena + 1) * arena;
    const std::size_t offset = position_ % arena;
    position_ += length;
    return offset;
  }

  Station& station_;
  const Call& call_;
  std::vector<const void*>& sources_;
  Streams* streams_;
  std::uint64_t position_;
  std::size_t staged_ = 0;
  std::size_t window_ = 0;
  std::size_t ring_ = 0;
  std::size_t chunk_bytes_ = 1;
  std::uint64_t ring_chunks_ = 1;
};

// Copies to outputs that are `bytes` long in all: past the caches where they would not stay there, and would
// only drive out what the ranks exchange.
class CopyOut {
 public:
  CopyOut(const Round& round, std::size_t bytes)
      : past_cache_(bytes >= round.tuning().past_cache_bytes), one_reader_(round.size() == 2) {}
  void operator()(std::byte* output, const std::byte* input, std::size_t bytes,
                  const std::byte* next = nullptr) const {
    if (output != input) (past_cache_ ? copy_streaming : copy)(output, input, bytes, next);
  }
  // The same out of a part of a ring that only this rank reads.
  void take(std::byte* output, std::byte* input, std::size_t bytes) const {
    (past_cache_ ? copy_taking_streaming : copy_taking)(output, input, bytes);
  }
  // Out of one that all other ranks read.
  void drain(std::byte* output, std::byte* input, std::size_t bytes) const {
    if (one_reader_) return take(output, input, bytes);
    (*this)(output, input, bytes);
  }

 private:
  bool past_cache_;
  bool one_reader_;
};

}  // namespace collectives
