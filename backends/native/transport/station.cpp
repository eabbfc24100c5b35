#include "transport/station.hpp"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "common/dtype.hpp"
#include "common/operation.hpp"
#include "memory/futex.hpp"
#include "transport/courier.hpp"
#include "transport/exchange.hpp"

namespace collectives {
namespace {

constexpr Nanoseconds kSlice = 100 * kMillisecond;
// A sleeper that is woken again and again looks around this often all the same.
constexpr Nanoseconds kLookEvery = 50 * kMillisecond;
// How much later than a connection's end the news of why it ended may come.
constexpr Nanoseconds kNewsLimit = 400 * kMillisecond;
// How often a rank leaves the core that it shares with a peer, at most.
constexpr Nanoseconds kAsideEvery = 10 * kMillisecond;

// Identity of the space in which process ids count; 0 where unknown.
std::uint64_t process_space() noexcept {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

int usable_cores() noexcept {
  cpu_set_t cores;
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

std::string seconds(Nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(time) / static_cast<double>(kSecond));
  return text;
}

// Says what the calling thread waits for, as long as it lives.
class Announcement {
 public:
  Announcement(CollectiveBell& bell, int publisher, std::uint64_t word, std::uint64_t value) : bell_(bell) {
    bell_.word.store(word, std::memory_order_relaxed);
    bell_.value.store(value, std::memory_order_relaxed);
    // The waiter's half of the handshake, and release of the two above.
    bell_.publisher.store(static_cast<std::uint32_t>(publisher) + 1, std::memory_order_seq_cst);
  }
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;
  ~Announcement() { bell_.publisher.store(0, std::memory_order_relaxed); }

 private:
  CollectiveBell& bell_;
};

}  // namespace

std::string describe(const Fingerprint& what, std::uint64_t own_count) {
  const Kind kind = static_cast<Kind>(what.kind);
  std::string text = name_of(kind);
  if (kind == Kind::barrier || kind == Kind::none) return text;
  text += "(";
  if (reduces(kind) && is_reduce_op(what.reduction)) {
    text += std::string(name_of(static_cast<ReduceOp>(what.reduction))) + ", ";
  }
  text += std::string(is_dtype(what.dtype) ? name_of(static_cast<DType>(what.dtype)) : "?") + ", " +
          std::to_string(own_count) + " elements";
  if (rooted(kind)) text += ", root " + std::to_string(what.root);
  return text + ")";
}

Station::Station(Membership membership, std::string label)
    : membership_(std::move(membership)),
      label_(std::move(label)),
      base_(membership_.segment->data()),
      own_(&page(membership_.rank)),
      process_space_(process_space()),
      crowded_(static_cast<int>(membership_.placement.local().size()) > usable_cores()),
      spinning_{Spinning(spinning_hope()), Spinning(spinning_hope())} {
  Status& mine = own_->status;
  mine.process.store(::getpid(), std::memory_order_relaxed);
  mine.process_space.store(process_space_, std::memory_order_relaxed);
  mine.entered.store(now_ns(), std::memory_order_relaxed);
  mine.presence.store(static_cast<std::uint32_t>(Presence::present), std::memory_order_release);
  if (!placement().several()) return;
  if (placement().leads(rank())) exchange_ = std::make_unique<Exchange>(*this);
  courier_ = std::make_unique<Courier>(*this, std::move(membership_.network));
}

Station::~Station() = default;

void Station::commit_mailbox(int receiver) const {
  membership_.segment->commit(membership_.layout.mailbox_offset(rank(), receiver), shape().mail_bytes);
}

void Station::ring(std::atomic<std::uint32_t>& rings) noexcept {
  rings.fetch_add(1, std::memory_order_release);
  futex_wake_all(rings, FutexScope::machine);
}

void Station::ring_everyone() const noexcept {
  for (int r = 0; r < size(); ++r) {
    ring(page(r).collective_bell.rings);
    ring(page(r).mail_bell.rings);
  }
  if (courier_) courier_->wake();
}

void Station::block(const Call& call, Wait kind, int peer, const std::atomic<std::uint64_t>& word,
                    std::uint64_t value) {
  const auto come = [&] { return word.load(std::memory_order_acquire) >= value; };
  const int spins = short_spins(peer);
  const auto spin = [&] {
    for (int i = 0; i < spins; ++i) {
      if (come()) return true;
      relax_processor();
    }
    return false;
  };
  if (spin()) return;
  Spinning& spinning = spinning_[static_cast<std::size_t>(kind)];
  const bool waited_for = call.interrupt != nullptr;  // so that this core has nothing better to do
  const bool together = on_core_of(peer) && !step_aside(next_aside_);
  const auto patience =
      static_cast<Nanoseconds>(waited_for ? tuning().spin_us : tuning().background_spin_us) * 1000;
  if (!together && spinning.worth_long(waited_for)) {
    const Nanoseconds end = now_ns() + patience;
    for (int round = 1; now_ns() < end; ++round) {
      if (spin()) return spinning.succeeded();
      if (round % Spinning::kRoundsToYield == 0) sched_yield();
    }
    spinning.failed();
  }
  if (waited_for) call.interrupt->blocks();
  // Where the core is offered instead of spun on, as long as one would spin.
  const Nanoseconds end = waited_for && (crowded_ || together) ? now_ns() + patience : 0;
  for (std::uint64_t i = 0; i < tuning().yields || (end != 0 && now_ns() < end); ++i) {
    sched_yield();
    if (come()) return;
  }
  sleep(call, peer, word, value);
}

int Station::short_spins(int peer) const noexcept {
  if (!crowded_) return Spinning::kShortSpins;
  return beside(peer) ? 1 : Spinning::kCrowdedSpins;
}

bool Station::on_core_of(int peer) const noexcept { return !crowded_ && beside(peer); }

bool Station::beside(int peer) const noexcept {
  const std::uint32_t core = note_core();
  return core != 0 && page(peer).status.core.load(std::memory_order_relaxed) == core;
}

// Ranks that take turns to sleep can stay on one core for ever, as it never has two threads to run at a time.
// The peer cannot do the same at this moment, since it does not run.
bool Station::step_aside(Nanoseconds& next) const noexcept {
  const Nanoseconds now = now_ns();
  if (now < next) return false;
  next = now + kAsideEvery;
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

void Station::sleep(const Call& call, int peer, const std::atomic<std::uint64_t>& word, std::uint64_t value) {
  CollectiveBell& bell = own_->collective_bell;
  Status& mine = own_->status;
  Nanoseconds now = now_ns();
  Nanoseconds next_look = now + kLookEvery;
  mine.entered.store(now, std::memory_order_relaxed);
  if (mine.site[0].load(std::memory_order_relaxed) != '\0') note_site("");
  const Announcement announcement(bell, peer, offset_of(word), value);
  for (;;) {
    const std::uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
    // Sequentially consistent: the waiter's second half of the handshake; acquire for what the peer wrote
    // before.
    if (word.load(std::memory_order_seq_cst) >= value) break;
    const bool undisturbed =
        futex_wait(bell.rings, rings, std::min(kSlice, call.deadline - now), FutexScope::machine);
    if (word.load(std::memory_order_seq_cst) >= value) break;
    now = now_ns();
    if (!undisturbed || now >= next_look || now >= call.deadline) {
      look_around(call, peer);
      next_look = now + kLookEvery;
    } else {
      check_unbroken();
    }
  }
}

void Station::look_around(const Call& call, int peer) const {
  check_unbroken();
  const auto needed = [&](int r) {
    return page(r).status.finished.load(std::memory_order_acquire) < call.sequence;
  };
  const auto lose_if_gone = [&](int r) {
    if (r == rank() || !needed(r) || !(departed(r) || dead(r))) return;
    // The last words of a rank that has gone may have come between the two looks.
    if (needed(r)) lose(r, describe(call.what, call.own_count) + " number " + std::to_string(call.sequence));
  };
  // This machine's own first: when a leader goes, the other machines break off what it was their link to, and
  // would be taken for the cause.
  for (const int r : placement().local()) lose_if_gone(r);
  for (int r = 0; r < size(); ++r) lose_if_gone(r);
  if (now_ns() >= call.deadline) time_out(call, peer);
  if (own_->status.site[0].load(std::memory_order_relaxed) == '\0') {
    if (call.interrupt != nullptr) {
      note_site(call.interrupt->site());
    } else if (call.site != nullptr) {
      note_site(*call.site);
    }
  }
  if (call.interrupt != nullptr) {
    if (call.interrupt->requested()) {
      const std::string text = "rank " + std::to_string(rank()) + " was interrupted in " +
                               describe(call.what, call.own_count) + " number " +
                               std::to_string(call.sequence);
      break_off(ErrorKind::aborted, rank(), text);
      throw Error(ErrorKind::interrupted, text);
    }
  }
}

bool Station::dead(int rank) const noexcept {
  if (!is_local(rank)) {
    const std::uint32_t presence = page(rank).status.presence.load(std::memory_order_acquire);
    return presence >= static_cast<std::uint32_t>(Presence::dead);
  }
  const Descriptor& process = membership_.processes[static_cast<std::size_t>(rank)];
  if (process) {
    pollfd ended{.fd = process.get(), .events = POLLIN, .revents = 0};
    return ::poll(&ended, 1, 0) > 0;
  }
  // A process id says something only among those that count alike.
  const Status& theirs = page(rank).status;
  const std::int32_t id = theirs.process.load(std::memory_order_relaxed);
  return id > 0 && process_space_ != 0 &&
         theirs.process_space.load(std::memory_order_relaxed) == process_space_ && ::kill(id, 0) != 0 &&
         errno == ESRCH;
}

bool Station::departed(int rank) const noexcept {
  return page(rank).status.presence.load(std::memory_order_acquire) ==
         static_cast<std::uint32_t>(Presence::departed);
}

bool Station::unreachable(int rank) const noexcept {
  return page(rank).status.presence.load(std::memory_order_acquire) ==
         static_cast<std::uint32_t>(Presence::unreachable);
}

bool Station::write_poison(const Poisoned& cause) const noexcept {
  Poison& record = poison();
  std::uint32_t clean = 0;
  // Acquire-release: one writer wins; what it writes below is released with state 2.
  if (!record.state.compare_exchange_strong(clean, 1, std::memory_order_acq_rel)) return false;
  record.kind = static_cast<std::uint32_t>(cause.kind);
  record.rank = cause.rank;
  record.writer = cause.writer;
  const std::size_t length = std::min(cause.text.size(), kPoisonText - 1);
  std::memcpy(record.text, cause.text.data(), length);
  record.text[length] = '\0';
  record.state.store(2, std::memory_order_release);
  return true;
}

void Station::poison(ErrorKind kind, int rank, const std::string& text) const noexcept {
  write_poison({kind, rank, this->rank(), text});
  if (courier_) courier_->wake();
}

void Station::break_off(ErrorKind kind, int rank, const std::string& text) const noexcept {
  poison(kind, rank, text);
  ring_everyone();
}

std::optional<Poisoned> Station::poisoned() const {
  const Poison& record = poison();
  if (record.state.load(std::memory_order_acquire) != 2) return std::nullopt;
  return Poisoned{static_cast<ErrorKind>(record.kind), record.rank, record.writer, record.text};
}

void Station::hear_poison(const Poisoned& news) const {
  write_poison(news);
  ring_everyone();
}

void Station::hear_gone(int rank, Presence how) const noexcept {
  std::atomic<std::uint32_t>& presence = page(rank).status.presence;
  // A rank that has left stays one that has left. Only the courier's thread writes mirrors.
  if (presence.load(std::memory_order_relaxed) >= static_cast<std::uint32_t>(Presence::departed)) return;
  presence.store(static_cast<std::uint32_t>(how), std::memory_order_release);
}

void Station::lose(int rank, const std::string& text) const {
  const char* how = " has died";
  if (departed(rank)) how = " has left the group";
  if (unreachable(rank))
    how = " cannot be reached any more, because its machine or the network between is gone,";
  const std::string cause = name_of_rank(rank) + " (process " +
                            std::to_string(page(rank).status.process.load(std::memory_order_relaxed)) + ")" +
                            how + " while others needed it in " + text + "; last seen: " + report_of(rank);
  break_off(ErrorKind::peer_lost, rank, cause);
  throw_broken(true);
}

void Station::lose_connection(const Call& call, int rank) const {
  const Nanoseconds limit = now_ns() + kNewsLimit;
  while (now_ns() < limit) {
    look_around(call, rank);
    const timespec pause{0, kMillisecond};
    ::nanosleep(&pause, nullptr);
  }
  // It closed its connection, and neither its leader nor its process tells why.
  lose(rank, describe(call.what, call.own_count) + " number " + std::to_string(call.sequence) +
                 ", where its connection ended");
}

void Station::meet_machines(const Call& call) {
  for (const int r : placement().local()) {
    if (r != rank())
      await(call, Wait::meeting, r, page(r).arrivals[call.sequence & 1].sequence, call.sequence);
  }
  std::atomic<std::uint64_t>& meetings = page(placement().leader()).relay.meetings;
  if (!exchange_) return await(call, Wait::meeting, placement().leader(), meetings, call.sequence);
  exchange_->run(call);
  publish(meetings, call.sequence);
}

int Station::laggard(const Call& call, int peer) const noexcept {
  if (!several()) return peer;
  for (int r = 0; r < size(); ++r) {
    const ControlPage& theirs = page(r);
    const std::uint64_t arrived = std::max({theirs.arrivals[0].sequence.load(std::memory_order_acquire),
                                            theirs.arrivals[1].sequence.load(std::memory_order_acquire),
                                            theirs.heard.arrived.load(std::memory_order_acquire)});
    if (arrived < call.sequence) return r;
  }
  return peer;
}

void Station::time_out(const Call& call, int waited_for) const {
  // What a leader waits for, or a rank for its leader, may be another's fault.
  const int peer = laggard(call, waited_for);
  const std::string text = describe(call.what, call.own_count) + " number " + std::to_string(call.sequence) +
                           " was not done within its timeout of " + seconds(call.timeout) + ": rank " +
                           std::to_string(rank()) + " waited for rank " + std::to_string(peer) +
                           ". Every rank:\n" + report();
  break_off(ErrorKind::timeout, peer, text);
  throw Error(ErrorKind::timeout, "[rank " + std::to_string(rank()) + "] " + label_ + ": " + text, peer);
}

void Station::throw_broken(bool begun) const {
  const std::string prefix = "[rank " + std::to_string(rank()) + "] " + label_;
  const Poison& record = poison();
  while (record.state.load(std::memory_order_acquire) == 1) sched_yield();  // its writer is about to finish
  const bool poisoned = record.state.load(std::memory_order_acquire) == 2;
  if (!poisoned) throw Error(ErrorKind::aborted, prefix + " was shut down");
  const auto kind = static_cast<ErrorKind>(record.kind);
  const std::string cause = std::string(record.text);
  if (kind == ErrorKind::peer_lost) throw Error(kind, prefix + ": " + cause, record.rank);
  if (kind == ErrorKind::timeout && begun) {
    throw Error(kind, prefix + ": rank " + std::to_string(record.writer) + " gave up: " + cause, record.rank);
  }
  throw Error(ErrorKind::aborted,
              prefix + " is broken since an earlier error; make a new group. The first cause: " + cause,
              record.rank);
}

void Station::abort(const std::string& reason) noexcept {
  poison(ErrorKind::aborted, rank(), reason);
  int running = kRunning;
  stop_.compare_exchange_strong(running, kAborted, std::memory_order_acq_rel);
  ring_everyone();
}

void Station::leave() noexcept {
  if (stop_.exchange(kLeft, std::memory_order_acq_rel) == kLeft) return;
  own_->status.presence.store(static_cast<std::uint32_t>(Presence::departed), std::memory_order_release);
  ring_everyone();
}

std::string Station::cause() const {
  return poison().state.load(std::memory_order_acquire) == 2 ? poison().text : "";
}

void Station::note_site(const std::string& site) const noexcept {
  Status& mine = own_->status;
  mine.site_version.fetch_add(1, std::memory_order_acq_rel);
  const std::size_t length = std::min(site.size(), kSiteBytes - 1);
  for (std::size_t i = 0; i < length; ++i) mine.site[i].store(site[i], std::memory_order_relaxed);
  mine.site[length].store('\0', std::memory_order_relaxed);
  mine.site_version.fetch_add(1, std::memory_order_release);
}

}  // namespace collectives
