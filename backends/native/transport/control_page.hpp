// What ranks tell each other in shared memory, and where it lies.
//
// Words. The *segment* is the one shared mapping of a group. A *line* is what one writer writes and others
// read without disturbing other lines. A collective has a *sequence number*, counted from 1 on every rank
// alike. *Parity* is its lowest bit; whatever is kept per parity may be rewritten by operation s + 2 without
// a further look at the peers, because a rank that has seen every arrival at s + 1 knows that every rank is
// done with s.
//
// The segment holds, in this order:
//   header             magic, shape, tuning, the poison
//   per rank           control page: arrivals, progress, status, bells
//                      split table: 2 parities x 2n numbers
//                      mail counters: n bytes-written, n bytes-read
//                      near slots: 2 parities x near_bytes, short contributions
//                      arena: all other contributions and the rings of long messages
//   per ordered pair   mailbox: mail_bytes of framed point-to-point bytes
// Everything is zero at the start. Mailboxes have no memory before their first use: a sender allocates its
// own.
//
// A segment belongs to one machine, and has a place for every rank of the group. The place of a remote rank
// is its *mirror*: there the machine's leader writes what it hears of that rank. It has no memory for an
// arena.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/clock.hpp"
#include "transport/tuning.hpp"

namespace collectives {

// Two 64-byte lines: processors fetch them in pairs, and some have lines of 128 bytes.
inline constexpr std::size_t kLine = 128;
inline constexpr std::size_t kPage = 4096;

// What an operation is, as far as its ranks must agree.
struct Fingerprint {
  std::uint8_t kind = 0;       // algorithms/operation.hpp
  std::uint8_t reduction = 0;  // ReduceOp, 0 where there is none
  std::uint8_t dtype = 0;      // DType
  std::uint8_t reserved = 0;
  std::uint32_t root = 0;   // 0 where there is none
  std::uint64_t count = 0;  // elements, where all ranks have equally many
  std::uint64_t check = 0;  // digest of part sizes or of a factor

  bool operator==(const Fingerprint&) const = default;
};
static_assert(sizeof(Fingerprint) == 24);

inline constexpr std::size_t kInlineBytes = 88;

struct alignas(kLine) Arrival {
  // Release: fingerprint, payload, split table, slot and everything else that the rank wrote before are
  // readable.
  std::atomic<std::uint64_t> sequence;
  Fingerprint what;
  std::uint64_t own_count;  // elements that this rank contributes; shown, not compared
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Arrival) == kLine);

// Marks of a long operation: (sequence << 24) + chunks done, so that they grow over all operations and need
// no reset.
struct alignas(kLine) Progress {
  std::atomic<std::uint64_t> filled;   // release: my ring holds these chunks
  std::atomic<std::uint64_t> reduced;  // release: my slices of these chunks hold results
  std::atomic<std::uint64_t> drained;  // release: I do not read these chunks any more, in any ring
  // Of a machine's agent (algorithms/pipeline.hpp).
  std::atomic<std::uint64_t> forwarded;  // release: what goes to other machines of these chunks has left
  std::atomic<std::uint64_t> arrived;    // release: my ring holds what other machines made of these chunks
};

// The last two are what a leader heard of a remote rank: its process has ended; its machine, or the network
// between, is gone.
enum class Presence : std::uint32_t { attaching = 0, present = 1, departed = 2, dead = 3, unreachable = 4 };

inline constexpr std::uint32_t kNobody = 0xffffffff;
inline constexpr std::size_t kSiteBytes = 96;

// For reports. Relaxed unless said: a reader takes it as a hint of the moment.
struct alignas(kLine) Status {
  std::atomic<std::uint32_t> presence;  // Presence; release at departure
  std::atomic<std::uint64_t>
      finished;                       // last collective done; release: the rank needs nothing of it any more
  std::atomic<Nanoseconds> entered;   // when the last collective began, or fell asleep
  std::atomic<std::int32_t> process;  // process id as the rank itself sees it
  std::atomic<std::uint64_t> process_space;  // the name space in which it counts
  std::atomic<std::uint32_t> mail_peer;  // rank + 1 that a blocked send or receive waits for, kNobody for any
  std::atomic<std::uint32_t> mail_kind;  // 1 send, 2 receive
  std::atomic<std::uint32_t> mail_tag;
  std::atomic<std::uint32_t> core;  // + 1, on which it last was in an operation; 0 unknown
  std::atomic<Nanoseconds> mail_since;
  std::atomic<std::uint32_t> site_version;  // odd while `site` changes
  std::atomic<char> site[kSiteBytes];       // source line of the blocked call, zero-terminated
};

// Where the one thread of a rank that executes a collective sleeps, and what for. The waiter stores what it
// waits for, then looks at the awaited word once more, then sleeps on `rings`; a publisher stores its word,
// then looks at what the waiter waits for, and rings only if that has come. Both stores and both looks are
// sequentially consistent, so that at least one side sees the other.
struct alignas(kLine) CollectiveBell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t>
      publisher;  // rank + 1 that is waited for, 0 while nobody sleeps; release of the next two
  std::atomic<std::uint64_t> word;   // offset in the segment
  std::atomic<std::uint64_t> value;  // that the word must reach
};

// Where threads of a rank sleep for point-to-point news of any peer; a publisher rings when there are any.
// The same handshake.
struct alignas(kLine) MailBell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;
};

// Only between machines.
struct alignas(kLine) Relay {
  std::uint64_t staged[2];  // by parity: bytes that this rank staged; released by its arrival
  std::atomic<std::uint64_t>
      meetings;  // of a leader: last collective at which all mirrors are up to date; release
  std::atomic<std::uint32_t> linked;  // of a leader: connected with all other leaders
};

// In a mirror: the last collective that the remote rank has begun, as its leader told when it stood still.
// For reports.
struct alignas(kLine) Heard {
  std::atomic<std::uint64_t> arrived;
  std::atomic<std::uint64_t> what[sizeof(Fingerprint) / sizeof(std::uint64_t)];
  std::atomic<std::uint64_t> own_count;
  std::atomic<std::uint32_t> waits_for;  // rank + 1, 0 for nobody
};

struct ControlPage {
  Arrival arrivals[2];
  Progress progress;
  Status status;
  CollectiveBell collective_bell;
  MailBell mail_bell;
  Relay relay;
  Heard heard;
};
static_assert(sizeof(ControlPage) <= kPage);

inline constexpr std::size_t kPoisonText = 2048;

// The first failure that broke the group. Written once: 0 -> 1 by the writer that wins, 1 -> 2 when the text
// is complete.
struct alignas(kLine) Poison {
  std::atomic<std::uint32_t> state;  // release at 2
  std::uint32_t kind;                // ErrorKind
  std::int32_t rank;                 // at fault, or -1
  std::int32_t writer;
  char text[kPoisonText];
};

// A position in a mailbox, in bytes from its beginning, never wrapped. The sender keeps one for each receiver
// (release: the bytes before it are readable), the receiver one for each sender (release: they may be
// overwritten).
struct alignas(kLine) MailCounter {
  std::atomic<std::uint64_t> bytes;
};

// Numbers that all ranks of a group derive from its size alone.
struct Shape {
  std::uint64_t size;
  std::uint64_t near_bytes;
  std::uint64_t arena_bytes;
  std::uint64_t standing_bytes;  // of them, at their end
  std::uint64_t mail_bytes;      // a power of two

  bool operator==(const Shape&) const = default;
};

// `several`: the group spans machines. What a rank stages is sent to them then, and must fit its near slot.
Shape shape_for(int size, bool several = false);

struct Header {
  std::uint64_t magic;
  std::uint64_t version;
  Shape shape;
  Tuning tuning;
  Poison poison;
};
static_assert(sizeof(Header) <= kPage);

inline constexpr std::uint64_t kMagic = 0x636f6c6c65637431;
inline constexpr std::uint64_t kLayoutVersion = 3;

// Offsets in the segment.
class Layout {
 public:
  explicit Layout(const Shape& shape);

  const Shape& shape() const noexcept { return shape_; }
  std::size_t total_bytes() const noexcept { return total_; }

  // What rank r writes for collectives, committed by rank r itself, on its own memory node.
  std::size_t rank_bytes() const noexcept { return rank_bytes_; }
  // The part of it that a mirror needs, committed by the leader.
  std::size_t mirror_bytes() const noexcept { return arena_; }
  std::size_t rank_offset(int rank) const noexcept {
    return kPage + static_cast<std::size_t>(rank) * rank_bytes_;
  }
  std::size_t splits_offset(int rank) const noexcept { return rank_offset(rank) + kPage; }
  std::size_t written_offset(int sender, int receiver) const noexcept {
    return rank_offset(sender) + counters_ + static_cast<std::size_t>(receiver) * sizeof(MailCounter);
  }
  std::size_t read_offset(int receiver, int sender) const noexcept {
    return rank_offset(receiver) + counters_ +
           (shape_.size + static_cast<std::size_t>(sender)) * sizeof(MailCounter);
  }
  std::size_t near_offset(int rank) const noexcept { return rank_offset(rank) + near_; }
  std::size_t arena_offset(int rank) const noexcept { return rank_offset(rank) + arena_; }

  std::size_t mailbox_bytes() const noexcept { return mailbox_bytes_; }
  std::size_t mailbox_offset(int sender, int receiver) const noexcept {
    return mailboxes_ +
           (static_cast<std::size_t>(sender) * shape_.size + static_cast<std::size_t>(receiver)) *
               mailbox_bytes_;
  }

 private:
  Shape shape_;
  std::size_t counters_ = 0;
  std::size_t near_ = 0;
  std::size_t arena_ = 0;
  std::size_t rank_bytes_ = 0;
  std::size_t mailboxes_ = 0;
  std::size_t mailbox_bytes_ = 0;
  std::size_t total_ = 0;
};

}  // namespace collectives
