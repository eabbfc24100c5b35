// One collective in progress on one rank: staging, the arrival of all ranks, and the chunk counters of long
// messages.
//
// Every collective begins with an arrival: each rank publishes what it is about to do and waits for
// everyone's arrival. So ranks that disagree all notice before any of them has written an output, on all
// machines. Short contributions are staged before the arrival and read right after it: one synchronisation in
// all.
//
// Long messages follow the arrival. They go through the ranks' rings in chunks, numbered from 0 in each
// operation. A rank has filled a chunk when its part can be read, reduced it when its slice holds results,
// drained it when it has read all it needs of it from every ring. The ring position of chunk c is free once
// everyone who reads it has drained the chunk that was there before.
//
// A rank stages in its arrival, in its staging slot, or in a region of its staging buffer, by size. Rings are
// regions too. Regions rotate through the buffer from operation to operation, because a cache line that its
// reader's core still holds is slow to write, and one that its writer's core has not yet evicted is slow to
// read: with a region in one place both would always be so (measured: 35 us instead of 14 for 256 KiB between
// two cores). All ranks reserve the same regions, so each knows where the others' are. What an operation
// stages overwrites nothing that the operation before it may still read, because both fit into the buffer,
// with what a region that wraps leaves unused; nobody reads what was there earlier, as all ranks have arrived
// since.
//
// A group of two has a fixed region at the end of the buffer, which holds its rings. A rank that reads a line
// there also writes it, a result or what it holds anyway: the line is the reader's alone then, and its next
// writer gets it at once (common/cache_line.hpp), so that a ring may be short enough to stay in the cores'
// own caches (measured: 13 us instead of 17 for 256 KiB). Where more than one rank reads a line none may do
// that. Nobody fills a ring before the arrival, when all are done with the operation before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "algorithms/chunks.hpp"
#include "algorithms/team.hpp"
#include "kernels/kernels.hpp"
#include "selection/selection.hpp"
#include "state/rank_context.hpp"

namespace collectives {

class MachineContribution;
class StreamPool;
struct MachineTransport;

class CollectiveContext {
 public:
  // `sources` is scratch space for one pointer a rank; `machines` is null in a group on one machine.
  CollectiveContext(RankContext& ranks, const Call& call, std::vector<const void*>& sources,
                    MachineTransport* machines)
      : ranks_(ranks),
        call_(call),
        sources_(sources),
        machines_(machines),
        position_(ranks.buffer_position()),
        team_(ranks) {}
  // To be called once the operation is done. One that failed has left everything as it was.
  void close() { ranks_.set_buffer_position(position_); }

  int rank() const noexcept { return ranks_.rank(); }
  int size() const noexcept { return ranks_.size(); }
  const Call& call() const noexcept { return call_; }
  const void** sources() const noexcept { return sources_.data(); }
  RankContext& rank_context() const noexcept { return ranks_; }
  const Topology& topology() const noexcept { return ranks_.topology(); }
  StreamPool& streams() const noexcept;
  const Tuning& tuning() const noexcept { return ranks_.tuning(); }
  // The calling thread alone until a long message begins.
  const Team& team() const noexcept { return team_; }
  // Begins a long message of which this rank moves so many bytes in all.
  void engage_team(std::size_t bytes) noexcept { team_.engage(bytes); }
  // `bytes`: the size that decides (selection/selection.hpp). `for_machine`: what a machine sends another at
  // most, where ranks reduce a part each.
  Algorithm algorithm(Opcode opcode, std::size_t bytes,
                      std::size_t for_machine = std::numeric_limits<std::size_t>::max()) const noexcept {
    const bool parts_fit = machines_ != nullptr && fits_arrival(for_machine);
    return select_algorithm(opcode, tuning(), size(), machines_ != nullptr, bytes, parts_fit);
  }

  // Reserves room for contributions of up to `bytes`. All ranks name the same number.
  void reserve(std::size_t bytes) {
    if (bytes > ranks_.shape().slot_bytes) region_ = next_region(bytes);
  }
  // Where this rank stages `bytes` before the arrival, and where a peer's are after it. No more than was
  // reserved.
  std::byte* stage(std::size_t bytes) noexcept {
    staged_ = bytes;
    return staging(rank(), bytes);
  }
  const std::byte* staged(int peer, std::size_t bytes) const noexcept { return staging(peer, bytes); }

  // The numbers of `RankContext::splits`: this rank's to be written before the arrival, a peer's to be read
  // after it, each once.
  std::uint64_t* splits(int peer) const noexcept { return ranks_.splits(peer, call_.sequence); }

  // Publishes this rank's arrival and waits for all ranks'. Throws ErrorKind::mismatch, on every rank alike,
  // where they differ.
  void arrive_and_wait() { arrive(nullptr); }
  // The same, where machines contribute as one.
  void arrive_with(MachineContribution& contribution) { arrive(&contribution); }
  // Whether short reductions do so though no rank reduces a part alone: where it spares bytes.
  bool sends_partials() const noexcept;
  // What another machine contributed to an operation of this kind.
  const std::byte* remote_partial(std::size_t machine) const noexcept {
    return ranks_.staging_slot(topology().leader_of(static_cast<int>(machine)), call_.sequence);
  }
  // Gives all ranks what each has put into `result(rank())`, of these lengths by rank; in an operation whose
  // contributions are too long to be staged there.
  void exchange_results(const std::vector<std::size_t>& lengths);
  std::byte* result(int peer) const noexcept { return ranks_.staging_slot(peer, call_.sequence); }

  // Throws ErrorKind::mismatch with the table of all ranks' operations. All ranks must come to the same
  // conclusion.
  [[noreturn]] void mismatch(const std::string& difference) const;

  // Chunks of a ring that is to stay in the cores' own caches.
  static constexpr std::uint64_t kFewChunks = 4;

  // Reserves the rings, for `chunks` chunks of at most `chunk_bytes`, as long as the tuning allows and no
  // longer than `longest` chunks. All ranks name the same numbers, after the arrival.
  void open_rings(std::uint64_t chunks, std::size_t chunk_bytes,
                  std::uint64_t longest = std::numeric_limits<std::uint64_t>::max()) {
    const bool fixed = ranks_.shape().fixed_bytes > 0;
    check_chunks(chunks);
    if (chunk_bytes > tuning().ring_bytes) [[unlikely]]
      too_long_for_buffer();
    chunk_bytes_ = chunk_bytes;
    ring_chunks_ = std::clamp<std::uint64_t>(
        chunks, 1, std::min({tuning().ring_bytes / chunk_bytes, longest, fixed ? kFewChunks : longest}));
    if (fixed) ranks_.commit_buffer();
    ring_ = fixed ? rotating_bytes() : next_region(ring_chunks_ * chunk_bytes);
  }
  // Throws where the words of `Progress` cannot count so many. All ranks name the same number.
  void check_chunks(std::uint64_t chunks) const {
    if (chunks >> kChunkBits != 0) [[unlikely]]
      too_many_chunks(chunks);
  }
  // Bytes of a chunk of a long message, which begins. All ranks name the same number: what a rank moves at
  // most.
  std::size_t begin_chunks(std::size_t bytes) noexcept {
    engage_team(bytes);
    return chunk_bytes_for(tuning(), bytes);
  }
  // The same for a piece of a chunk that holds one for each rank, at equal distances.
  std::size_t begin_pieces(std::size_t bytes) noexcept {
    return std::max(round_down(begin_chunks(bytes) / static_cast<std::size_t>(size()), kSliceAlignment),
                    kSliceAlignment);
  }
  std::byte* chunk(int peer, std::uint64_t index) const noexcept {
    return ranks_.staging_buffer(peer) + ring_ + (index % ring_chunks_) * chunk_bytes_;
  }

  // Reserves a part of every local rank's staging buffer as long as the operation lasts; returns its offset.
  // All ranks of a machine name the same number, after the arrival.
  std::size_t open_region(std::size_t bytes) {
    if (bytes > rotating_bytes()) [[unlikely]]
      too_long_for_buffer();
    return next_region(bytes);
  }
  std::byte* region(int peer, std::size_t offset) const noexcept {
    return ranks_.staging_buffer(peer) + offset;
  }

  // The words of `Progress`: whether a rank's has reached a chunk, and waiting for that.
  using Word = std::atomic<std::uint64_t> Progress::*;
  void publish(Word word, std::uint64_t chunk) { ranks_.publish(ranks_.own().progress.*word, mark(chunk)); }
  bool has(int peer, Word word, std::uint64_t chunk) const noexcept {
    return (ranks_.page(peer).progress.*word).load(std::memory_order_acquire) >= mark(chunk);
  }
  void await(int peer, Word word, std::uint64_t chunk) {
    ranks_.await(call_, RankContext::Wait::work, peer, ranks_.page(peer).progress.*word, mark(chunk));
  }

  void filled(std::uint64_t chunk) { ranks_.publish(ranks_.own().progress.filled, mark(chunk)); }
  void reduced(std::uint64_t chunk) { ranks_.publish(ranks_.own().progress.reduced, mark(chunk)); }
  void drained(std::uint64_t chunk) { ranks_.publish(ranks_.own().progress.drained, mark(chunk)); }

  void await_filled(int peer, std::uint64_t chunk) {
    ranks_.await(call_, RankContext::Wait::work, peer, ranks_.page(peer).progress.filled, mark(chunk));
  }
  void await_reduced(int peer, std::uint64_t chunk) {
    ranks_.await(call_, RankContext::Wait::work, peer, ranks_.page(peer).progress.reduced, mark(chunk));
  }
  // Until `reader` leaves room for `chunk` in this rank's ring.
  void await_room(int reader, std::uint64_t chunk) {
    if (chunk < ring_chunks_) return;
    ranks_.await(call_, RankContext::Wait::work, reader, ranks_.page(reader).progress.drained,
                 mark(chunk - ring_chunks_));
  }
  void await_room(std::uint64_t chunk) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) await_room(r, chunk);
    }
  }

 private:
  static constexpr unsigned kChunkBits = 24;

  void arrive(MachineContribution* contribution);
  bool fits_arrival(std::size_t for_machine) const noexcept;
  std::uint64_t mark(std::uint64_t chunk) const noexcept {
    return (call_.sequence << kChunkBits) + chunk + 1;
  }
  std::byte* staging(int peer, std::size_t bytes) const noexcept {
    if (bytes <= kInlineBytes) return ranks_.arrival(peer, call_.sequence).payload;
    if (bytes <= ranks_.shape().slot_bytes) return ranks_.staging_slot(peer, call_.sequence);
    return ranks_.staging_buffer(peer) + region_;
  }
  [[noreturn]] void too_long_for_buffer() const;
  [[noreturn]] void too_many_chunks(std::uint64_t chunks) const;
  // The part of the staging buffer through which regions rotate.
  std::size_t rotating_bytes() const noexcept {
    return ranks_.shape().buffer_bytes - ranks_.shape().fixed_bytes;
  }
  // The offset in the staging buffer of a region that does not wrap.
  std::size_t next_region(std::size_t bytes) {
    ranks_.commit_buffer();
    const std::size_t buffer = rotating_bytes();
    const std::size_t length = (bytes + kLine - 1) / kLine * kLine;
    if (position_ % buffer + length > buffer) position_ = (position_ / buffer + 1) * buffer;
    const std::size_t offset = position_ % buffer;
    position_ += length;
    return offset;
  }

  RankContext& ranks_;
  const Call& call_;
  std::vector<const void*>& sources_;
  MachineTransport* machines_;
  std::uint64_t position_;
  std::size_t staged_ = 0;
  std::size_t region_ = 0;
  std::size_t ring_ = 0;
  std::size_t chunk_bytes_ = 1;
  std::uint64_t ring_chunks_ = 1;
  Team team_;
};

// Copies to outputs that are `bytes` long in all: past the caches where they would not stay there, and would
// only drive out what the ranks exchange. Outputs in the place of inputs, which have `just_been_read`, are in
// the cache already, and cost less there (measured, an all-reduce of 8 to 64 MiB by 2 ranks: 8 to 13 %).
class CopyOut {
 public:
  CopyOut(const CollectiveContext& collective, std::size_t bytes, bool just_been_read = false)
      : team_(collective.team()),
        past_cache_(!just_been_read && bytes >= collective.tuning().past_cache_bytes),
        one_reader_(collective.size() == 2) {}
  void operator()(std::byte* output, const std::byte* input, std::size_t bytes,
                  const std::byte* next = nullptr) const {
    if (output == input) return;
    team_.split(bytes, kSliceAlignment, 2 * bytes, [&](std::size_t begin, std::size_t end) {
      whole(output + begin, input + begin, end - begin, next == nullptr ? nullptr : next + begin);
    });
  }
  // By the calling thread.
  void whole(std::byte* output, const std::byte* input, std::size_t bytes,
             const std::byte* next = nullptr) const {
    (past_cache_ ? copy_streaming : copy)(output, input, bytes, next);
  }
  // The same out of a part of a ring that only this rank reads.
  void take(std::byte* output, std::byte* input, std::size_t bytes) const {
    team_.split(bytes, kSliceAlignment, 2 * bytes, [&](std::size_t begin, std::size_t end) {
      take_whole(output + begin, input + begin, end - begin);
    });
  }
  void take_whole(std::byte* output, std::byte* input, std::size_t bytes) const {
    (past_cache_ ? copy_taking_streaming : copy_taking)(output, input, bytes);
  }
  // Out of one that all other ranks read.
  void drain(std::byte* output, std::byte* input, std::size_t bytes) const {
    if (one_reader_) return take(output, input, bytes);
    (*this)(output, input, bytes);
  }

 private:
  const Team& team_;
  bool past_cache_;
  bool one_reader_;
};

}  // namespace collectives
