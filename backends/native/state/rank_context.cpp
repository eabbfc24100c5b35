#include "state/rank_context.hpp"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/codes.hpp"
#include "memory/copy_once.hpp"
#include "memory/descriptor.hpp"
#include "memory/futex.hpp"

namespace collectives {
namespace {

// How often a waiting rank looks whether others run another program.
constexpr Nanoseconds kLookEvery = kSecond;
// How often a rank leaves the core that it shares with a peer, at most.
constexpr Nanoseconds kCoreChangeEvery = 10 * kMillisecond;

// Identity of the space in which process ids count; 0 where unknown.
std::uint64_t process_space() noexcept {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

int usable_cores() noexcept {
  cpu_set_t cores;
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// Of the host. Its containers may be left some each, so that `usable_cores` says nothing of their ranks.
int online_cores() noexcept { return static_cast<int>(std::max(::sysconf(_SC_NPROCESSORS_ONLN), 1L)); }

}  // namespace

std::string describe(const Call& call) {
  return describe(call.what, call.own_count) + " number " + std::to_string(call.sequence);
}

ErrorDetails details_of(const Call& call) {
  return {.operation = name_of(static_cast<Opcode>(call.what.opcode)),
          .sequence = static_cast<std::int64_t>(call.sequence)};
}

std::string describe(const Fingerprint& what, std::uint64_t own_count) {
  const auto opcode = static_cast<Opcode>(what.opcode);
  std::string text = name_of(opcode);
  if (opcode == Opcode::barrier || opcode == Opcode::none) return text;
  text += '(';
  if (reduces(opcode) && is_reduce_op(what.reduction)) {
    text += std::string(name_of(static_cast<ReduceOp>(what.reduction))) + ", ";
  }
  text += std::string(is_dtype(what.dtype) ? name_of(static_cast<DType>(what.dtype)) : "?") + ", " +
          std::to_string(own_count) + " elements";
  if (rooted(opcode)) text += ", root " + std::to_string(what.root);
  return text + ")";
}

std::optional<Failure> failure_of(const FailureRecord& record, int size) {
  // Acquire: the fields.
  if (record.state.load(std::memory_order_acquire) != FailureRecord::kFailureComplete) return std::nullopt;
  // A text without an end is as long as there is room for it.
  return unpacked(copy_once(record.details), std::string(record.text, ::strnlen(record.text, kFailureText)),
                  size);
}

RankContext::RankContext(Membership membership, std::string label)
    : membership_(std::move(membership)),
      label_(std::move(label)),
      base_(membership_.segment->data()),
      own_(&page(membership_.rank)),
      process_space_(process_space()),
      machine_crowded_(static_cast<int>(membership_.topology.local().size()) > usable_cores()),
      host_crowded_(membership_.ranks_on_host > online_cores()),
      spin_policy_{SpinPolicy(spin_likelihood(Wait::arrival)), SpinPolicy(spin_likelihood(Wait::work))},
      workers_(membership_.threads > 1 ? WorkerPool::of_process() : nullptr) {
  if (topology().leads(rank())) {
    auto& shown = reinterpret_cast<SegmentHeader*>(base_)->label;
    for (std::size_t i = 0; i < std::min(label_.size(), kLabelBytes - 1); ++i) {
      shown[i].store(label_[i], std::memory_order_relaxed);
    }
  }
  Status& mine = own_->status;
  mine.process.store(::getpid(), std::memory_order_relaxed);
  mine.process_space.store(process_space_, std::memory_order_relaxed);
  mine.image.store(state_of_process(::getpid()).image, std::memory_order_relaxed);
  mine.entered.store(now_ns(), std::memory_order_relaxed);
  mine.presence.store(static_cast<std::uint32_t>(Presence::present), std::memory_order_release);
  try {
    if (spans_machines()) poll_event_ = make_event();
  } catch (const Error& error) {
    fail_to_join(error);
    throw;
  }
}

RankContext::~RankContext() = default;

void RankContext::allocate_buffer() {
  try {
    membership_.segment->commit(membership_.layout.buffer_offset(rank()), shape().buffer_bytes);
  } catch (const Error& error) {
    fail_group(error.kind(),
               "rank " + std::to_string(rank()) + " has no memory to stage tensors in: " + error.message(),
               {.rank = rank()});
    throw_broken(true);
  }
  buffer_committed_ = true;
}

void RankContext::commit_mailbox(int receiver) const {
  membership_.segment->commit(membership_.layout.mailbox_offset(rank(), receiver), shape().mail_bytes);
}

void RankContext::ring(std::atomic<std::uint32_t>& rings) noexcept {
  rings.fetch_add(1, std::memory_order_release);  // of the word that was published
  futex_wake_all(rings, FutexScope::machine);
}

void RankContext::ring_everyone() const noexcept {
  for (const int r : topology().local()) {
    ring(page(r).collective_doorbell.rings);
    ring(page(r).mail_doorbell.rings);
  }
  wake_leader();
}

void RankContext::signal_poll_event() const noexcept { signal_event(poll_event_); }

void RankContext::clear_poll_event() const noexcept { clear_event(poll_event_); }

// The leader tells the other machines of a failure; a thread of this process may wait in poll().
void RankContext::wake_leader() const noexcept {
  signal_event(membership_.leader_event);
  signal_poll_event();
}

void RankContext::block(const Call& call, Wait reason, int peer, const std::atomic<std::uint64_t>& word,
                        std::uint64_t value) {
  const auto come = [&] { return word.load(std::memory_order_acquire) >= value; };
  const int spins = short_spins(reason, peer);
  const auto spin = [&] {
    for (int i = 0; i < spins; ++i) {
      if (come()) return true;
      relax_processor();
    }
    return false;
  };
  if (spin()) return;
  SpinPolicy& spin_policy = spin_policy_[static_cast<std::size_t>(reason)];
  const bool waited_for = call.interrupt != nullptr;  // so that this core has nothing better to do
  const bool together = shares_core_with(reason, peer) && !leave_core(next_core_change_);
  const auto patience =
      static_cast<Nanoseconds>(waited_for ? tuning().spin_us : tuning().background_spin_us) * 1000;
  if (!together && spin_policy.should_spin_long(waited_for)) {
    const Nanoseconds end = now_ns() + patience;
    while (now_ns() < end) {
      if (spin()) return spin_policy.succeeded();
    }
    spin_policy.failed();
  }
  if (waited_for) call.interrupt->blocks();
  if (crowded(reason) || together) {
    const Nanoseconds end = waited_for ? now_ns() + patience : 0;  // as long as one would spin
    for (std::uint64_t i = 0; i < tuning().yields || now_ns() < end; ++i) {
      sched_yield();
      if (come()) return;
    }
  }
  sleep(call, peer, word, value);
}

int RankContext::short_spins(Wait reason, int peer) const noexcept {
  if (!crowded(reason)) return SpinPolicy::kShortSpins;
  return last_seen_on_this_core(peer) ? 1 : SpinPolicy::kCrowdedSpins;
}

bool RankContext::shares_core_with(Wait reason, int peer) const noexcept {
  return !crowded(reason) && last_seen_on_this_core(peer);
}

bool RankContext::last_seen_on_this_core(int peer) const noexcept {
  const std::uint32_t core = note_core();
  return core != 0 && page(peer).status.core.load(std::memory_order_relaxed) == core;
}

// Ranks that sleep alternately can stay on one core for ever, as it never has two threads to run at a time.
// The peer cannot do the same at this moment, since it does not run.
bool RankContext::leave_core(Nanoseconds& next) const noexcept {
  const Nanoseconds now = now_ns();
  if (now < next) return false;
  next = now + kCoreChangeEvery;
  cpu_set_t allowed;
  const int core = ::sched_getcpu();
  if (core < 0 || ::sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2)
    return false;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<std::size_t>(core), &others);
  if (::sched_setaffinity(0, sizeof(others), &others) != 0) return false;  // which moves the thread at once
  ::sched_setaffinity(0, sizeof(allowed), &allowed);
  note_core();
  return true;
}

void RankContext::sleep(const Call& call, int peer, const std::atomic<std::uint64_t>& word,
                        std::uint64_t value) {
  CollectiveDoorbell& bell = own_->collective_doorbell;
  Status& mine = own_->status;
  Nanoseconds now = now_ns();
  Nanoseconds next_check = now + kCheckEvery;
  mine.entered.store(now, std::memory_order_relaxed);
  if (mine.site[0].load(std::memory_order_relaxed) != '\0') note_site("");
  bell.word.store(offset_of(word), std::memory_order_relaxed);
  bell.value.store(value, std::memory_order_relaxed);
  // The waiter's half of the handshake, and release of the two above.
  bell.publisher.store(static_cast<std::uint32_t>(peer) + 1, std::memory_order_seq_cst);
  for (;;) {
    // Acquire: before the look at the word, and of the word where the bell has rung.
    const std::uint32_t rings = bell.rings.load(std::memory_order_acquire);
    // Sequentially consistent: the waiter's second half of the handshake; acquire of what the peer wrote
    // before.
    if (word.load(std::memory_order_seq_cst) >= value) break;
    const bool undisturbed =
        futex_wait(bell.rings, rings, std::min(kLongestSleep, call.deadline - now), FutexScope::machine);
    if (word.load(std::memory_order_seq_cst) >= value) break;
    now = now_ns();
    if (!undisturbed || now >= next_check || now >= call.deadline) {
      check_liveness(call, peer);
      next_check = now + kCheckEvery;
    } else {
      check_unbroken();
    }
  }
  // Not where the wait fails: that breaks the group, and the reports of other ranks say whom this one
  // waited for.
  waits_for(-1);
}

void RankContext::check_liveness(const Call& call, int peer, const std::string& aside) const {
  check_unbroken();
  look_for_replaced();
  const auto needed = [&](int r) {
    return page(r).status.finished.load(std::memory_order_acquire) < call.sequence;
  };
  const auto throw_if_gone = [&](int r) {
    if (r == rank() || !needed(r) || !(departed(r) || dead(r))) return;
    // What a rank published last may have become visible between the two checks.
    if (needed(r)) throw_peer_lost(r, describe(call), details_of(call));
  };
  // This machine's own first: when a leader goes, the other machines lose their connection to it and with it
  // their local ranks, which would be taken for the cause.
  for (const int r : topology().local()) throw_if_gone(r);
  for (int r = 0; r < size(); ++r) throw_if_gone(r);
  if (now_ns() >= call.deadline) throw_timeout(call, peer, aside);
  if (own_->status.site[0].load(std::memory_order_relaxed) == '\0') {
    if (call.interrupt != nullptr) {
      note_site(call.interrupt->site());
    } else if (call.site != nullptr) {
      note_site(*call.site);
    }
  }
  if (call.interrupt != nullptr && call.interrupt->requested()) {
    const std::string text = "rank " + std::to_string(rank()) + " was interrupted in " + describe(call);
    ErrorDetails about = details_of(call);
    about.rank = rank();
    fail_group(ErrorKind::aborted, text, about);
    throw Error(ErrorKind::interrupted, text, about);
  }
}

bool RankContext::dead(int rank) const noexcept {
  if (!is_local(rank)) {
    const std::uint32_t presence = page(rank).status.presence.load(std::memory_order_acquire);
    return presence >= static_cast<std::uint32_t>(Presence::dead);
  }
  if (page(rank).status.presence.load(std::memory_order_acquire) ==
      static_cast<std::uint32_t>(Presence::dead))
    return true;
  const ProcessDescriptor& process = membership_.processes[static_cast<std::size_t>(rank)];
  if (process) {
    pollfd ended{.fd = process->get(), .events = POLLIN, .revents = 0};
    return ::poll(&ended, 1, 0) > 0;
  }
  return process_state(rank).ended;
}

bool RankContext::departed(int rank) const noexcept {
  return page(rank).status.presence.load(std::memory_order_acquire) ==
         static_cast<std::uint32_t>(Presence::departed);
}

bool RankContext::unreachable(int rank) const noexcept {
  return page(rank).status.presence.load(std::memory_order_acquire) ==
         static_cast<std::uint32_t>(Presence::unreachable);
}

ProcessState RankContext::process_state(int rank) const noexcept {
  const Status& theirs = page(rank).status;
  const std::int32_t id = theirs.process.load(std::memory_order_relaxed);
  // A process id says something only among those that count alike.
  const bool known = is_local(rank) && id > 0 && process_space_ != 0 &&
                     theirs.process_space.load(std::memory_order_relaxed) == process_space_;
  return known ? state_of_process(id) : ProcessState{};
}

bool RankContext::stopped(int rank) const noexcept { return process_state(rank).stopped; }

void RankContext::look_for_replaced() const noexcept {
  const Nanoseconds now = now_ns();
  Nanoseconds due = next_look_.load(std::memory_order_relaxed);
  if (now < due || !next_look_.compare_exchange_strong(due, now + kLookEvery, std::memory_order_relaxed))
    return;
  for (const int r : topology().local()) {
    if (r == rank()) continue;
    Status& theirs = page(r).status;
    const std::uint64_t image = theirs.image.load(std::memory_order_relaxed);
    const std::uint64_t found = process_state(r).image;
    if (image == 0 || found == 0 || image == found) continue;
    // A rank that has left runs what it likes. Release: pairs with the acquire of who looks.
    auto present = static_cast<std::uint32_t>(Presence::present);
    theirs.presence.compare_exchange_strong(present, static_cast<std::uint32_t>(Presence::dead),
                                            std::memory_order_acq_rel);
  }
}

void RankContext::write_failure(const Failure& failure) const noexcept {
  FailureRecord& record = failure_record();
  std::uint32_t state = FailureRecord::kNoFailure;
  const std::uint32_t writing = FailureRecord::kFirstWriter + static_cast<std::uint32_t>(rank());
  // Acquire-release: one writer wins, and all can see which one writes the fields below.
  if (!record.state.compare_exchange_strong(state, writing, std::memory_order_acq_rel)) return;
  const std::size_t length = std::min(failure.text.size(), kFailureText - 1);
  record.details = packed(failure);
  // Of a text that is cut, the end is no more what it was.
  if (length < failure.text.size()) record.details.behind = 0;
  std::memcpy(record.text, failure.text.data(), length);
  record.text[length] = '\0';
  record.state.store(FailureRecord::kFailureComplete, std::memory_order_release);
}

void RankContext::fail_group(const Failure& failure) const noexcept {
  write_failure(failure);
  ring_everyone();
}

void RankContext::fail_group(ErrorKind kind, const std::string& text,
                             const ErrorDetails& about) const noexcept {
  fail_group({.kind = kind, .writer = rank(), .text = text, .about = about});
}

void RankContext::abort(const std::string& reason) const noexcept {
  fail_group(ErrorKind::aborted, reason, {.rank = rank()});
}

std::optional<Failure> RankContext::failure() const { return failure_of(failure_record(), size()); }

void RankContext::fail_to_join(const Error& error) const noexcept {
  fail_group(error.kind(), "rank " + std::to_string(rank()) + " could not join: " + error.message(),
             {.rank = rank()});
}

void RankContext::record_remote_exit(int rank, Presence how) const noexcept {
  std::atomic<std::uint32_t>& presence = page(rank).status.presence;
  // A rank that has departed stays departed. Relaxed: only the connection manager's thread writes mirrors.
  if (presence.load(std::memory_order_relaxed) >= static_cast<std::uint32_t>(Presence::departed)) return;
  presence.store(static_cast<std::uint32_t>(how), std::memory_order_release);
}

void RankContext::leave() noexcept {
  if (left_.exchange(true, std::memory_order_release)) return;
  own_->status.presence.store(static_cast<std::uint32_t>(Presence::departed), std::memory_order_release);
  ring_everyone();
}

void RankContext::note_site(const std::string& site) const noexcept {
  Status& mine = own_->status;
  mine.site_version.fetch_add(1, std::memory_order_acq_rel);
  const std::size_t length = std::min(site.size(), kSiteBytes - 1);
  for (std::size_t i = 0; i < length; ++i) mine.site[i].store(site[i], std::memory_order_release);
  mine.site[length].store('\0', std::memory_order_release);
  mine.site_version.fetch_add(1, std::memory_order_release);
}

}  // namespace collectives
