// What each rank publishes to the others in shared memory: its arrival at a collective, its progress, its
// status for reports, and the doorbells that its threads sleep on.
//
// Every group of fields that one rank writes lies on cache lines of its own, so that ranks do not disturb
// each other. Collectives have sequence numbers that count from 1 on every rank alike. What is kept per
// parity (the lowest bit of the sequence number) may be rewritten by operation s + 2 without another look at
// the peers: a rank that has seen every arrival at s + 1 knows that every rank is done with s.
//
// A segment belongs to one machine and has a control page for every rank of the group. The page of a remote
// rank is its mirror: the leader of the machine writes there what it receives about that rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/clock.hpp"

namespace collectives {

// Two 64-byte cache lines: processors fetch them in pairs, and some have lines of 128 bytes.
inline constexpr std::size_t kLine = 128;
inline constexpr std::size_t kPage = 4096;

// What an operation is, as far as its ranks must agree.
struct Fingerprint {
  std::uint8_t opcode = 0;     // Opcode
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
  std::atomic<std::uint64_t> drained;  // release: I no longer read these chunks, in any ring
  // Of a machine's gateway (algorithms/pipeline.hpp).
  std::atomic<std::uint64_t> forwarded;  // release: what goes to other machines of these chunks has left
  std::atomic<std::uint64_t> arrived;    // release: my ring holds what other machines made of these chunks
};

// `dead` of a local rank: another one has found out that its process runs another program. `dead` and
// `unreachable` in mirrors: the remote process has ended; its machine, or the network in between, is gone.
enum class Presence : std::uint32_t { attaching = 0, present = 1, departed = 2, dead = 3, unreachable = 4 };

// What a thread that is blocked in point-to-point communication waits in.
enum class MailDirection : std::uint32_t { none = 0, send = 1, receive = 2 };

inline constexpr std::uint32_t kNobody = 0xffffffff;
inline constexpr std::size_t kSiteBytes = 96;

// For reports. Relaxed unless said: a reader takes each field as a hint of the moment.
struct alignas(kLine) Status {
  std::atomic<std::uint32_t> presence;        // Presence; release at departure
  std::atomic<std::uint64_t> finished;        // last collective done; release: the rank needs nothing of it
  std::atomic<Nanoseconds> entered;           // when the last collective began, or fell asleep
  std::atomic<std::int32_t> process;          // process id as the rank itself sees it
  std::atomic<std::uint64_t> process_space;   // the name space in which it counts
  std::atomic<std::uint64_t> image;           // of its program (state/process_state.hpp)
  std::atomic<std::uint32_t> mail_peer;       // rank + 1 that a send or receive waits for, kNobody for any
  std::atomic<std::uint32_t> mail_direction;  // MailDirection
  std::atomic<std::uint32_t> mail_tag;
  std::atomic<std::uint32_t> core;  // + 1, on which it last was in an operation; 0 unknown
  std::atomic<Nanoseconds> mail_since;
  // Odd while `site` changes. Whoever reads a new character, with acquire, finds the version changed
  // afterwards, because characters are stored with release.
  std::atomic<std::uint32_t> site_version;
  std::atomic<char> site[kSiteBytes];  // source line of the blocked call, zero-terminated
};

// Where the thread of a rank that executes a collective sleeps, and what for. The waiter stores what it waits
// for, then checks the awaited word once more, then sleeps on `rings`; a publisher stores its word, then
// checks what the waiter waits for, and rings only if the word has reached that. Both stores and both loads
// are sequentially consistent, so that at least one side sees the other.
struct alignas(kLine) CollectiveDoorbell {
  // Release by whoever rings: its word. Acquire by the sleeper, before its last look at that word.
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> publisher;  // rank + 1 that is waited for, 0 while nobody sleeps; see above
  std::atomic<std::uint64_t> word;       // offset in the segment; released by `publisher`
  std::atomic<std::uint64_t> value;      // that the word must reach; released by `publisher`
};

// Where threads of a rank sleep for point-to-point bytes or room; a publisher rings when there are sleepers.
// Ordered as in CollectiveDoorbell.
struct alignas(kLine) MailDoorbell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;
};

// Of arrivals in a group that spans machines.
struct alignas(kLine) MachineArrival {
  std::uint64_t staged[2];  // by parity: bytes that this rank staged; released by its arrival
  // Of a leader. Release: all mirrors are up to date for this collective.
  std::atomic<std::uint64_t> complete;
  // Of a leader. Release: it is connected with all other leaders.
  std::atomic<std::uint32_t> connected;
};

// In a mirror, for reports: the last collective that the remote rank has begun, as its leader reported when
// the rank made no progress. `arrived` is stored with release and orders the others, which are relaxed.
struct alignas(kLine) RemoteStatus {
  std::atomic<std::uint64_t> arrived;
  std::atomic<std::uint64_t> what[sizeof(Fingerprint) / sizeof(std::uint64_t)];
  std::atomic<std::uint64_t> own_count;
  std::atomic<std::uint32_t> waits_for;  // rank + 1, 0 for nobody
};

struct ControlPage {
  Arrival arrivals[2];
  Progress progress;
  Status status;
  CollectiveDoorbell collective_doorbell;
  MailDoorbell mail_doorbell;
  MachineArrival machine_arrival;
  RemoteStatus remote;
};
static_assert(sizeof(ControlPage) <= kPage);

// A position in a mailbox, in bytes from its beginning, never wrapped. The sender keeps one for each receiver
// (release: the bytes before it are readable), the receiver one for each sender (release: they may be
// overwritten).
struct alignas(kLine) MailCounter {
  std::atomic<std::uint64_t> bytes;
};

}  // namespace collectives
