// A rank's view of its group's shared memory: what it publishes, how it waits for the others, and how it
// learns that they are gone.
//
// Waiting goes in two steps: spin, or yield where ranks outnumber cores (spin_policy.hpp says how long), then
// sleep on this rank's doorbell. A sleeper wakes at least every 100 ms and checks whether to go on: an abort
// here, the group's failure record, dead or departed peers, the deadline, the interrupt hook.
//
// Of a group that spans machines each machine has a segment, whose leader keeps the mirrors of remote ranks
// up to date (transport/arrival_exchange.hpp, transport/control_channel.hpp).
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
#include <vector>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "state/call.hpp"
#include "state/membership.hpp"
#include "state/process_state.hpp"
#include "state/rank_snapshot.hpp"
#include "state/segment_layout.hpp"
#include "state/spin_policy.hpp"
#include "state/worker_pool.hpp"

namespace collectives {

enum class Purpose : std::uint32_t;  // hello.hpp

// How much later than the end of a connection the control channel may tell why it ended. It takes up to a
// second where the dead rank led its machine, and longer where a thread that tells gets no core.
inline constexpr Nanoseconds kExplanationLimit = 5 * kSecond;

// What broke a group, in words that every rank may show.
struct Failure {
  ErrorKind kind = ErrorKind::aborted;
  int writer = -1;         // who found out
  std::string text = {};   // NOLINT(readability-redundant-member-init): as in ErrorDetails
  std::size_t behind = 0;  // bytes at the end of the text: the exception for which a rank's program aborted
  ErrorDetails about = {};
};

// The failure that `error` says, as rank `writer` tells it.
Failure failure_from(const Error& error, int writer);
// The other way round.
Error error_from(const Failure& failure);
FailureDetails packed(const Failure& failure);
// Believes nothing of what it is given; `size` is the number of ranks.
Failure unpacked(const FailureDetails& details, std::string text, int size);
// What an error says that comes of a failure.
ErrorDetails details_after(const Failure& failure);
// What a record of a group of `size` ranks holds; nothing before a failure.
std::optional<Failure> failure_of(const FailureRecord& record, int size);

class RankContext {
 public:
  // What a rank waits for: another's arrival, or its share of the work, such as a message. Shares come from
  // ranks of this machine, so that only these may need the waiting rank's core. An arrival is complete when
  // the ranks of all machines are here, and those of other containers may need that core, too. Measured with
  // 2 machines of 2 ranks on 2 cores: 8 bytes take 24 us instead of 40 where arrivals count the ranks of the
  // host, and 1 MiB takes 0.8 ms instead of 0.6 where shares count them, too.
  enum class Wait { arrival, work };

  // `label` names the group in messages.
  RankContext(Membership membership, std::string label);
  ~RankContext();
  RankContext(const RankContext&) = delete;
  RankContext& operator=(const RankContext&) = delete;

  int rank() const noexcept { return membership_.rank; }
  int size() const noexcept { return membership_.size; }
  const SegmentShape& shape() const noexcept { return membership_.layout.shape(); }
  const Tuning& tuning() const noexcept { return membership_.tuning; }
  const Topology& topology() const noexcept { return membership_.topology; }
  bool spans_machines() const noexcept { return topology().spans_machines(); }
  bool is_local(int rank) const noexcept { return topology().is_local(rank); }
  // The threads that move and reduce a long message of this rank, its own among them; the pool of the others,
  // null where there are none.
  unsigned threads() const noexcept { return membership_.threads; }
  bool workers_linger() const noexcept { return membership_.workers_linger; }
  WorkerPool* workers() const noexcept { return workers_.get(); }
  // Hands over what the membership says of the network; once.
  Network take_network() noexcept { return std::move(membership_.network); }
  // "rank 3", and on which machine where the group spans machines.
  std::string name_of_rank(int rank) const;
  // "[rank 3] default group", with which this rank's errors begin.
  std::string prefix() const;

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
  std::byte* staging_slot(int rank, std::uint64_t sequence) const noexcept {
    return base_ + membership_.layout.slot_offset(rank) + (sequence & 1) * shape().slot_bytes;
  }
  std::byte* staging_buffer(int rank) const noexcept {
    return base_ + membership_.layout.buffer_offset(rank);
  }
  // Allocates this rank's staging buffer, once, for an operation that is about to use it. Where there is no
  // memory, throws and breaks the group, whose ranks may wait for this one. Only for the thread that executes
  // collectives.
  void commit_buffer() {
    if (!buffer_committed_) [[unlikely]]
      allocate_buffer();
  }
  // Where the next operation begins in every rank's staging buffer, in bytes that never wrap. Only for the
  // thread that executes collectives.
  std::uint64_t buffer_position() const noexcept { return buffer_position_; }
  void set_buffer_position(std::uint64_t position) noexcept { buffer_position_ = position; }

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

  // Stores a word that others may sleep for, and wakes those who do.
  void publish(std::atomic<std::uint64_t>& word, std::uint64_t value) const noexcept {
    word.store(value, std::memory_order_seq_cst);  // release for the readers, and one half of the handshake
    for (const int r : topology().local()) {
      CollectiveDoorbell& doorbell = page(r).collective_doorbell;
      // The other half; acquire of the two relaxed loads below.
      if (doorbell.publisher.load(std::memory_order_seq_cst) != static_cast<std::uint32_t>(rank()) + 1)
        continue;
      if (doorbell.word.load(std::memory_order_relaxed) == offset_of(word) &&
          doorbell.value.load(std::memory_order_relaxed) <= value) {
        ring(doorbell.rings);
      }
    }
  }
  void ring_mail(int rank) const noexcept {
    MailDoorbell& doorbell = page(rank).mail_doorbell;
    // The publisher's half of the handshake; the word before it was stored sequentially consistent.
    if (doorbell.sleepers.load(std::memory_order_seq_cst) != 0) ring(doorbell.rings);
  }
  void ring_own_mail() const noexcept { ring_mail(rank()); }
  // Wakes all threads of this machine that sleep for the group.
  void ring_everyone() const noexcept;

  // An eventfd for poll() beside sockets: readable once this process, or a leader's connection manager, has
  // found something that a waiting operation should check.
  int poll_event() const noexcept { return poll_event_.get(); }
  void signal_poll_event() const noexcept;
  void clear_poll_event() const noexcept;
  // The eventfd that wakes the leader's connection manager to look at the segment.
  const Descriptor& leader_event() const noexcept { return membership_.leader_event; }

  // Blocks until `word`, which `peer` writes, has reached `value`. Throws where the group breaks, and on the
  // deadline.
  void await(const Call& call, Wait reason, int peer, const std::atomic<std::uint64_t>& word,
             std::uint64_t value) {
    // Acquire: what the peer wrote before it published.
    if (word.load(std::memory_order_acquire) < value) block(call, reason, peer, word, value);
  }

  // Whether the group can do nothing more: left, or broken by anyone. Acquire of both: what was written
  // before is readable.
  bool broken() const noexcept {
    return left_.load(std::memory_order_acquire) ||
           failure_record().state.load(std::memory_order_acquire) != FailureRecord::kNoFailure;
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

  // Checks whether a waiting operation is to go on, for which `peer` matters most: throws where the group is
  // broken, where a rank that is needed has gone, on the deadline, and where the interrupt hook says so. Not
  // for every turn of a loop: it costs system calls. `aside`: what an error is to say besides.
  void check_liveness(const Call& call, int peer, const std::string& aside = {}) const;

  // Whether the rank's process has ended, or its machine has vanished. One system call for a local rank.
  bool dead(int rank) const noexcept;
  bool departed(int rank) const noexcept;
  bool unreachable(int rank) const noexcept;
  // Whether a rank of this machine is stopped, as by a signal or a debugger; as far as can be told.
  bool stopped(int rank) const noexcept;
  // Looks, once a second at most, for ranks of this machine that run another program since `exec`; they count
  // as dead from then on.
  void look_for_replaced() const noexcept;
  // Breaks the group for all ranks, and wakes everyone to notice; the first failure stays.
  void fail_group(const Failure& failure) const noexcept;
  // The same for what this rank has found out.
  void fail_group(ErrorKind kind, const std::string& text, const ErrorDetails& about) const noexcept;
  // The same where this rank can do no more.
  void abort(const std::string& reason) const noexcept;
  // The same where this rank cannot make what it needs of the group, of which others may be members already.
  void fail_to_join(const Error& error) const noexcept;
  // Breaks the group because of a word in shared memory that rank `owner` writes: it is `value`, and can only
  // be what is `allowed`.
  void fail_on_word(int owner, const std::string& word, std::uint64_t value,
                    const std::string& allowed) const;
  // The same, and throws.
  [[noreturn]] void throw_on_word(int owner, const std::string& word, std::uint64_t value,
                                  const std::string& allowed) const;
  // Breaks the group because a rank is gone that `operation` needed, and throws.
  [[noreturn]] void throw_peer_lost(int rank, const std::string& operation, ErrorDetails about) const;
  // The same where the connection with a rank has ended, and nobody tells that the rank has.
  [[noreturn]] void throw_disconnected(int rank, const std::string& operation, ErrorDetails about) const;
  // A connection with a remote rank has ended in an operation: waits a little for the control channel to tell
  // why, then throws.
  [[noreturn]] void throw_connection_lost(const Call& call, int rank) const;
  // For bytes on a connection with a rank that its other end did not send.
  void fail_forged(int rank, Purpose purpose) const;
  [[noreturn]] void throw_forged(int rank, Purpose purpose) const;

  // Marks this rank as departed and releases its own waiting threads. Idempotent.
  void leave() noexcept;
  // The first failure, once it is recorded completely.
  std::optional<Failure> failure() const;

  // What an error says of an operation whose time is up: `details` follows its limit, then the report.
  std::string timeout_text(const std::string& operation, Nanoseconds timeout,
                           const std::string& details) const;
  // What an error says of an operation that was not done after its caller had waited so long.
  Error not_done(const std::string& operation, Nanoseconds waited, const ErrorDetails& about) const;
  // Adds to what an error says of a collective the ranks that hold up the one that this rank is in, if any.
  void add_blame(ErrorDetails& about) const;
  // What every rank waits in or did last, a line for each.
  std::string report() const;
  std::string report_of(int rank) const;
  // What the report is made from.
  RankSnapshot snapshot(int rank) const;

  Status& status() const noexcept { return own_->status; }
  // Records for reports which rank this one waits for, outside of `await`; -1 for none.
  void waits_for(int rank) const noexcept {
    own_->collective_doorbell.publisher.store(static_cast<std::uint32_t>(rank + 1),
                                              std::memory_order_relaxed);
  }
  // Records the core that the calling thread is on; to be called in every operation, because a rank that
  // always comes last never waits, and those that wait beside it must know. Returns what it recorded.
  std::uint32_t note_core() const noexcept {
    const auto core = static_cast<std::uint32_t>(::sched_getcpu() + 1);
    // Written only when it changes: others read this line. Relaxed: a hint of the moment.
    std::atomic<std::uint32_t>& mine = own_->status.core;
    if (mine.load(std::memory_order_relaxed) != core) mine.store(core, std::memory_order_relaxed);
    return core;
  }
  SpinPolicy::Likelihood spin_likelihood(Wait reason) const noexcept {
    return crowded(reason) ? SpinPolicy::Likelihood::none : SpinPolicy::Likelihood::high;
  }
  // How often to check for a peer's word before this thread's core is offered to others.
  int short_spins(Wait reason, int peer) const noexcept;
  // Whether a rank of this machine was last seen on this thread's core, though there is one for each.
  bool shares_core_with(Wait reason, int peer) const noexcept;
  // Moves the calling thread to another core, which the kernel may undo later. Returns false where it may not
  // move, or did so a moment ago; `next` is the caller's: when it may again.
  bool leave_core(Nanoseconds& next) const noexcept;
  // Records where a blocked call comes from.
  void note_site(const std::string& site) const noexcept;

  // For the control channel: the process of a local rank, empty where there is no descriptor; and which ranks
  // other machines reported to be gone.
  const ProcessDescriptor& process(int rank) const noexcept {
    return membership_.processes[static_cast<std::size_t>(rank)];
  }
  void record_remote_exit(int rank, Presence how) const noexcept;

 private:
  std::atomic<std::uint64_t>& counter(std::size_t offset) const noexcept {
    return reinterpret_cast<MailCounter*>(base_ + offset)->bytes;
  }
  FailureRecord& failure_record() const noexcept { return reinterpret_cast<SegmentHeader*>(base_)->failure; }
  std::uint64_t offset_of(const std::atomic<std::uint64_t>& word) const noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(&word) - base_);
  }
  void allocate_buffer();
  static void ring(std::atomic<std::uint32_t>& rings) noexcept;
  void wake_leader() const noexcept;
  ProcessState process_state(int rank) const noexcept;
  bool crowded(Wait reason) const noexcept {
    return machine_crowded_ || (host_crowded_ && reason == Wait::arrival);
  }
  bool last_seen_on_this_core(int peer) const noexcept;
  void block(const Call& call, Wait reason, int peer, const std::atomic<std::uint64_t>& word,
             std::uint64_t value);
  void sleep(const Call& call, int peer, const std::atomic<std::uint64_t>& word, std::uint64_t value);
  void write_failure(const Failure& failure) const noexcept;
  void add_blame(ErrorDetails& about, std::uint64_t sequence, int waited_for) const;
  std::vector<int> missing_ranks(std::uint64_t sequence, bool local) const;
  int end_of_waiting(std::uint64_t sequence, int peer) const;
  [[noreturn]] void throw_broken(bool begun) const;
  [[noreturn]] void throw_timeout(const Call& call, int peer, const std::string& aside) const;

  Membership membership_;
  std::string label_;
  std::byte* base_;
  ControlPage* own_;
  std::uint64_t process_space_;
  mutable std::atomic<Nanoseconds> next_look_{
      0};                          // for `exec`; relaxed, as any thread may be the one to look
  std::atomic<bool> left_{false};  // release of the failure that was recorded before; see `broken`
  std::uint64_t buffer_position_ = 0;
  bool buffer_committed_ = false;
  const bool machine_crowded_;  // there are more ranks here than cores that they may use
  const bool host_crowded_;     // more ranks on this physical host, over all its containers, than cores
  SpinPolicy spin_policy_[2];   // by Wait; of the thread that executes collectives
  Nanoseconds next_core_change_ = 0;
  Descriptor poll_event_;  // of a group that spans machines
  const std::shared_ptr<WorkerPool> workers_;
};

}  // namespace collectives
