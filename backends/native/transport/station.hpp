// A rank's place in the segment: what it publishes, how it waits for the others, and how it learns that they
// are gone.
//
// Waiting goes in three steps, because ranks may outnumber cores: spin (Spinning says how long), yield, then
// sleep on this rank's bell. A sleeper wakes at least every 100 ms and looks whether to go on: an abort here,
// the group's poison, dead or departed peers, the deadline, the interrupt hook.
//
// Of a group that spans machines each has a segment, and its leader exchanges arrivals with the other leaders
// (exchange.hpp) and other news (courier.hpp, herald.hpp).
//
// Thread safety: one thread at a time executes collectives; `abort`, `leave` and the queries may be called
// from any.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "transport/bootstrap.hpp"
#include "transport/control_page.hpp"
#include "transport/snapshot.hpp"
#include "transport/spinning.hpp"

namespace collectives {

class Courier;
class Exchange;
class Herald;

// What a thread that blocks in an operation owes to its owner. The bindings use it for Python's lock and
// signals.
class Interrupt {
 public:
  virtual ~Interrupt() = default;
  // The calling thread is about to yield or sleep, perhaps again.
  virtual void blocks() = 0;
  // Whether to give the operation up.
  virtual bool requested() = 0;
  // The source line of the call, or an empty text.
  virtual std::string site() = 0;
};

// A collective on its way: what a waiting thread needs to know of it.
struct Call {
  std::uint64_t sequence = 0;
  Fingerprint what;
  std::uint64_t own_count = 0;
  Nanoseconds timeout = 0;  // as given, for the message
  Nanoseconds deadline = kNever;
  Interrupt* interrupt = nullptr;
  const std::string* site = nullptr;  // the source line, of a call that nobody blocks in
};

// What broke a group, in words that every rank may show.
struct Poisoned {
  ErrorKind kind = ErrorKind::aborted;
  int rank = -1;    // at fault, or -1
  int writer = -1;  // who found out
  std::string text;
};

inline void relax_processor() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

class Station {
 public:
  // `label` names the group in messages.
  Station(Membership membership, std::string label);
  ~Station();
  Station(const Station&) = delete;
  Station& operator=(const Station&) = delete;

  int rank() const noexcept { return membership_.rank; }
  int size() const noexcept { return membership_.size; }
  const Shape& shape() const noexcept { return membership_.layout.shape(); }
  const Tuning& tuning() const noexcept { return membership_.tuning; }
  Spinning::Hope spinning_hope() const noexcept {
    return crowded_ ? Spinning::Hope::none : Spinning::Hope::good;
  }
  const std::string& label() const noexcept { return label_; }
  const Placement& placement() const noexcept { return membership_.placement; }
  bool several() const noexcept { return courier_ != nullptr; }  // machines
  bool is_local(int rank) const noexcept { return placement().is_local(rank); }
  // Null on one machine.
  Courier* courier() const noexcept { return courier_.get(); }
  // "rank 3", and on which machine where there are several.
  std::string name_of_rank(int rank) const;

  ControlPage& page(int rank) const noexcept {
    return *reinterpret_cast<ControlPage*>(base_ + membership_.layout.rank_offset(rank));
  }
  ControlPage& own() const noexcept { return *own_; }
  Arrival& arrival(int rank, std::uint64_t sequence) const noexcept {
    return page(rank).arrivals[sequence & 1];
  }
  // 2n numbers: elements that the rank sends to, then expects from, each rank.
  std::uint64_t* splits(int rank, std::uint64_t sequence) const noexcept {
    return reinterpret_cast<std::uint64_t*>(base_ + membership_.layout.splits_offset(rank)) +
           (sequence & 1) * 2 * shape().size;
  }
  std::byte* near_slot(int rank, std::uint64_t sequence) const noexcept {
    return base_ + membership_.layout.near_offset(rank) + (sequence & 1) * shape().near_bytes;
  }
  std::byte* arena(int rank) const noexcept { return base_ + membership_.layout.arena_offset(rank); }
  // Where the next operation begins in every rank's arena, in bytes that never wrap. Only for the thread that
  // executes collectives.
  std::uint64_t arena_position() const noexcept { return arena_position_; }
  void set_arena_position(std::uint64_t position) noexcept { arena_position_ = position; }

  std::atomic<std::uint64_t>& written(int sender, int receiver) const noexcept {
    return counter(membership_.layout.written_offset(sender, receiver));
  }
  std::atomic<std::uint64_t>& read(int receiver, int sender) const noexcept {
    return counter(membership_.layout.read_offset(receiver, sender));
  }
  std::byte* mailbox(int sender, int receiver) const noexcept {
    return base_ + membership_.layout.mailbox_offset(sender, receiver);
  }
  // Allocates the mailbox that this rank fills for `receiver`.
  void commit_mailbox(int receiver) const;

  // Stores news that others may sleep for, and wakes those who do.
  void publish(std::atomic<std::uint64_t>& word, std::uint64_t value) const noexcept {
    word.store(value, std::memory_order_seq_cst);  // release for the readers, and one half of the handshake
    for (int r = 0; r < size(); ++r) {
      CollectiveBell& bell = page(r).collective_bell;
      if (bell.publisher.load(std::memory_order_seq_cst) != static_cast<std::uint32_t>(rank()) + 1) continue;
      if (bell.word.load(std::memory_order_relaxed) == offset_of(word) &&
          bell.value.load(std::memory_order_relaxed) <= value) {
        ring(bell.rings);
      }
    }
  }
  void ring_mail(int rank) const noexcept {
    MailBell& bell = page(rank).mail_bell;
    if (bell.sleepers.load(std::memory_order_seq_cst) != 0) ring(bell.rings);
  }
  void ring_own_mail() const noexcept { ring_mail(rank()); }

  // Blocks until `word`, which `peer` writes, has reached `value`. Throws where the group breaks, and on the
  // deadline. Waiting for peers to come and waiting for their share of the work are different experiences, so
  // each has its own.
  enum class Wait { meeting, work };
  void await(const Call& call, Wait kind, int peer, const std::atomic<std::uint64_t>& word,
             std::uint64_t value) {
    if (word.load(std::memory_order_acquire) < value) block(call, kind, peer, word, value);
  }

  // The meeting of machines, after this rank has published its arrival: returns when the arrivals of all
  // ranks and what they staged can be read. On a leader, that waits for its local ranks, sends what they
  // brought to the other leaders, and writes theirs to the mirrors; on the others, waits for their leader.
  void meet_machines(const Call& call);

  // Whether the group can do nothing more: aborted, left, or poisoned by anyone.
  bool broken() const noexcept {
    return stop_.load(std::memory_order_acquire) != kRunning ||
           poison().state.load(std::memory_order_acquire) != 0;
  }
  // Throws where the group is broken, before an operation begins.
  void check_usable() const {
    if (broken()) [[unlikely]]
      throw_broken(false);
  }
  // The same for an operation that has begun; called by sleepers.
  void check_unbroken() const {
    if (broken()) throw_broken(true);
  }

  // Looks whether a waiting operation is to go on, for which `peer` matters most: throws where the group is
  // broken, where a rank that is needed has gone, on the deadline, and where the interrupt hook says so. Not
  // for every turn of a loop: it costs system calls.
  void look_around(const Call& call, int peer) const;

  // Whether the rank's process has ended, or its machine has vanished. One system call for a local rank.
  bool dead(int rank) const noexcept;
  bool departed(int rank) const noexcept;
  bool unreachable(int rank) const noexcept;
  // Breaks the group for all ranks; the first cause stays.
  void poison(ErrorKind kind, int rank, const std::string& text) const noexcept;
  // The same, and wakes everyone to notice.
  void break_off(ErrorKind kind, int rank, const std::string& text) const noexcept;
  [[noreturn]] void lose(int rank, const std::string& text) const;
  // A connection with a remote rank has ended in an operation: waits a little for the control plane to tell
  // why, then throws.
  [[noreturn]] void lose_connection(const Call& call, int rank) const;

  // Releases all waiting threads of this rank and breaks the group for its peers.
  void abort(const std::string& reason) noexcept;
  // Marks this rank as departed and releases its own waiting threads. Idempotent.
  void leave() noexcept;
  // Why the group is broken; empty where it is not.
  std::string cause() const;

  // What every rank waits in or did last, a line for each.
  std::string report() const;
  std::string report_of(int rank) const;
  // What the report is made from.
  Snapshot snapshot(int rank) const;

  Status& status() const noexcept { return own_->status; }
  // Records for reports which rank this one waits for, outside of `await`; -1 for none.
  void waits_for(int rank) const noexcept {
    own_->collective_bell.publisher.store(static_cast<std::uint32_t>(rank + 1), std::memory_order_relaxed);
  }
  // Records the core that the calling thread is on; to be called in every operation, because a rank that
  // always comes last never waits, and those that wait beside it must know. Returns what it recorded.
  std::uint32_t note_core() const noexcept {
    const auto core = static_cast<std::uint32_t>(::sched_getcpu() + 1);
    // Only news is written: others read this line.
    std::atomic<std::uint32_t>& mine = own_->status.core;
    if (mine.load(std::memory_order_relaxed) != core) mine.store(core, std::memory_order_relaxed);
    return core;
  }
  // How often to look for a peer's news before this thread's core is offered to others.
  int short_spins(int peer) const noexcept;
  // Whether a rank of this machine was last seen on this thread's core, though there is one for each.
  bool on_core_of(int peer) const noexcept;
  // Leaves it for another core, which the kernel may undo later. Returns false where it may not, or where
  // that was a moment ago; `next` is the caller's: when it may again.
  bool step_aside(Nanoseconds& next) const noexcept;
  // Records where a blocked call comes from.
  void note_site(const std::string& site) const noexcept;

 private:
  friend class Herald;

  // For the herald: the process of a local rank, empty where there is no descriptor; and the news of others.
  const Descriptor& process(int rank) const noexcept {
    return membership_.processes[static_cast<std::size_t>(rank)];
  }
  std::optional<Poisoned> poisoned() const;
  void hear_poison(const Poisoned& news) const;
  void hear_gone(int rank, Presence how) const noexcept;

  enum Stop : int { kRunning, kAborted, kLeft };

  std::atomic<std::uint64_t>& counter(std::size_t offset) const noexcept {
    return reinterpret_cast<MailCounter*>(base_ + offset)->bytes;
  }
  Poison& poison() const noexcept { return reinterpret_cast<Header*>(base_)->poison; }
  std::uint64_t offset_of(const std::atomic<std::uint64_t>& word) const noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(&word) - base_);
  }
  static void ring(std::atomic<std::uint32_t>& rings) noexcept;
  void ring_everyone() const noexcept;
  bool beside(int peer) const noexcept;
  void block(const Call& call, Wait kind, int peer, const std::atomic<std::uint64_t>& word,
             std::uint64_t value);
  void sleep(const Call& call, int peer, const std::atomic<std::uint64_t>& word, std::uint64_t value);
  bool write_poison(const Poisoned& cause) const noexcept;
  int laggard(const Call& call, int peer) const noexcept;
  [[noreturn]] void throw_broken(bool begun) const;
  [[noreturn]] void time_out(const Call& call, int peer) const;

  Membership membership_;
  std::string label_;
  std::byte* base_;
  ControlPage* own_;
  std::uint64_t process_space_;
  std::atomic<int> stop_{kRunning};
  std::uint64_t arena_position_ = 0;
  const bool crowded_;    // there are more ranks here than cores
  Spinning spinning_[2];  // by Wait; of the thread that executes collectives
  Nanoseconds next_aside_ = 0;
  std::unique_ptr<Exchange> exchange_;  // of a leader, between machines; for that thread alone
  std::unique_ptr<Courier> courier_;    // between machines; last, so that its thread ends first
};

// "all_reduce(SUM, float32, 1024 elements)".
std::string describe(const Fingerprint& what, std::uint64_t own_count);

}  // namespace collectives
