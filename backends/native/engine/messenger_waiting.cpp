// Waiting for messages: the driver, the background thread, failures, and the end.
#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/messenger.hpp"
#include "kernels/kernels.hpp"
#include "memory/futex.hpp"

namespace collectives {
namespace {

constexpr Nanoseconds kSlice = 100 * kMillisecond;
constexpr int kYields = 2;

// What another machine sent before its news came has come after this long.
constexpr Nanoseconds kOnItsWay = kSecond;

// The background thread looks this often whether it is needed, while there is point-to-point traffic at all.
constexpr Nanoseconds kTick = kMillisecond;
constexpr int kIdleTicks = 50;

}  // namespace

// ---- failing
// ----------------------------------------------------------------------------------------------------

void Messenger::withdraw(Transfer& transfer) {
  const auto is_it = [&](const TransferPointer& other) { return other.get() == &transfer; };
  if (transfer.direction() == Transfer::Direction::send) {
    std::erase_if(outgoing_[static_cast<std::size_t>(transfer.envelope().peer)].queue, is_it);
    return;
  }
  posted_.remove_if(is_it);
  for (Incoming& incoming : incoming_) {
    if (incoming.current && incoming.current->receiver.get() == &transfer) incoming.current->receiver.reset();
  }
}

void Messenger::fail_all(const Error& error) {
  posted_.clear();
  for (Outgoing& outgoing : outgoing_) outgoing.queue.clear();
  for (Incoming& incoming : incoming_) {
    if (incoming.current) incoming.current->receiver.reset();
  }
  while (!outstanding_.empty()) finish(outstanding_.front(), error);
}

void Messenger::lose_dead_leader() {
  const Placement& placement = station_->placement();
  if (!placement.several()) return;
  for (int machine = 0; machine < placement.count(); ++machine) {
    const int leader = placement.leader_of(machine);
    if (leader == rank_ || station_->departed(leader) || !station_->dead(leader)) continue;
    // Nobody tells its machine any more what happens elsewhere, nor others what happens there.
    station_->lose(leader, outstanding_.front()->describe());
  }
}

void Messenger::look_around() {
  try {
    station_->check_unbroken();
    const auto ranks = static_cast<std::size_t>(station_->size());
    std::vector<bool> departed(ranks);
    std::vector<bool> dead(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (static_cast<int>(r) == rank_) continue;
      departed[r] = gone(static_cast<int>(r));
      dead[r] = !departed[r] && station_->dead(static_cast<int>(r));
    }
    pump();  // what a rank sent before it went has come by now, or never will
    if (!outstanding_.empty()) lose_dead_leader();
    const std::list<TransferPointer> transfers = outstanding_;
    for (const TransferPointer& transfer : transfers) {
      if (transfer->finished()) continue;
      const int peer = transfer->envelope().peer;
      bool somebody = peer == rank_ || (peer == kAnyRank && ranks == 1);  // who could still complete it
      for (std::size_t r = 0; r < ranks; ++r) {
        const int rank = static_cast<int>(r);
        if (rank == rank_ || (peer != kAnyRank && peer != rank)) continue;
        if (dead[r]) station_->lose(rank, transfer->describe());
        if (!departed[r]) check_connections(*transfer, rank);
        somebody = somebody || !departed[r];
      }
      if (!somebody) {
        withdraw(*transfer);
        const char* who = peer == kAnyRank ? "all other ranks have" : "that rank has";
        finish(transfer, Error(ErrorKind::peer_lost,
                               prefix() + transfer->describe() + ": " + who + " left the group", peer));
      } else if (now_ns() >= transfer->deadline()) {
        time_out(transfer);
      }
    }
  } catch (const Error& error) {
    fail_all(error);
  }
}

// Whether the rank has left and nothing of it is on its way any more. News of machines travel apart from
// their messages.
bool Messenger::gone(int rank) {
  if (!station_->departed(rank)) return false;
  if (station_->placement().is_local(rank)) return true;
  Incoming& incoming = incoming_[static_cast<std::size_t>(rank)];
  const Nanoseconds now = now_ns();
  if (incoming.departed == 0) incoming.departed = now;
  return incoming.box->ended() != 0 || now >= incoming.departed + kOnItsWay;
}

// A connection that ended while its rank goes on will not come back. Whatever else ends one is told by other
// ways within a moment.
void Messenger::check_connections(const Transfer& transfer, int rank) const {
  const bool sends = transfer.direction() == Transfer::Direction::send;
  const Outbox& out = *outgoing_[static_cast<std::size_t>(rank)].box;
  const Inbox& in = *incoming_[static_cast<std::size_t>(rank)].box;
  const Nanoseconds ended = sends ? out.ended() : in.ended();
  if (ended == 0 || now_ns() < ended + kOnItsWay) return;
  station_->lose(rank, transfer.describe() + " (" + (sends ? out.trouble() : in.trouble()) + ")");
}

void Messenger::time_out(const TransferPointer& transfer) {
  const int peer = transfer->envelope().peer;
  const std::string head = transfer->describe() + " was not done within its timeout of " +
                           std::to_string(transfer->timeout() / kMillisecond) + " ms";
  const std::string tail = ". Every rank:\n" + station_->report();
  const auto fail = [&](const std::string& state) {
    finish(transfer, Error(ErrorKind::timeout, prefix() + head + state + tail, peer));
  };
  const std::string bytes = std::to_string(transfer->envelope().bytes) + " bytes";
  if (transfer->direction() == Transfer::Direction::receive) {
    const std::optional<std::uint64_t> come = put_back(*transfer);
    withdraw(*transfer);
    if (!come) return fail("; nothing of a message had come, and the group stays usable");
    return fail("; " + std::to_string(*come) + " of " + bytes +
                " had come, which the next receive gets with the rest, and the group stays usable");
  }
  if (!transfer->begun_) {
    withdraw(*transfer);
    return fail("; nothing of it had left, and the group stays usable");
  }
  // A message that has left in part can be neither taken back nor completed: its memory is the caller's
  // again.
  const std::string state = "; " + std::to_string(transfer->moved_) + " of " + bytes +
                            " were on their way and cannot be taken back, so that the group is broken: make "
                            "a new one, with a longer timeout or with the receive issued earlier";
  station_->break_off(ErrorKind::timeout, peer, head + state + tail);
  withdraw(*transfer);
  fail(state);
  station_->check_unbroken();
}

// What has come for a receive that gives up is not lost with it, as the sender counts on its arrival: the
// message waits for the next receive, or goes to one that waits already. Returns how much of it had come.
std::optional<std::uint64_t> Messenger::put_back(const Transfer& transfer) {
  const auto found = std::find_if(incoming_.begin(), incoming_.end(), [&](const Incoming& incoming) {
    return incoming.current && incoming.current->receiver.get() == &transfer;
  });
  if (found == incoming_.end()) return std::nullopt;
  const std::shared_ptr<Message> message = found->current;
  message->receiver.reset();
  const std::uint64_t come = message->come;
  if (!give_memory(*message)) return come;
  collectives::copy(message->memory.get(), transfer.data_, come);
  unexpected_.push_back(message);  // nothing later of its sender has been opened
  const auto next = std::find_if(posted_.begin(), posted_.end(), [&](const TransferPointer& other) {
    return wants(other->envelope(), *message);
  });
  if (next != posted_.end()) match_unexpected(TransferPointer(*next));
  return come;
}

std::string Messenger::prefix() const {
  return "[rank " + std::to_string(rank_) + "] " + station_->label() + ": ";
}

// ---- waiting
// ----------------------------------------------------------------------------------------------------

Nanoseconds Messenger::nearest_deadline() const {
  Nanoseconds nearest = kNever;
  for (const TransferPointer& transfer : outstanding_) nearest = std::min(nearest, transfer->deadline());
  return nearest;
}

void Messenger::poll() {
  const Lock lock(mutex_);
  if (station_ != nullptr && !closing_) pump();
}

bool Messenger::wait(Transfer& transfer, Nanoseconds deadline, Interrupt* interrupt) {
  Lock lock(mutex_);
  return wait(lock, transfer, deadline, interrupt);
}

bool Messenger::wait(Lock& lock, Transfer& transfer, Nanoseconds deadline, Interrupt* interrupt) {
  ++waiters_;
  const auto leave = [&] {
    --waiters_;
    changed_.notify_all();
  };
  try {
    while (!transfer.finished() && now_ns() < deadline) {
      if (station_ == nullptr) break;  // closed: everything is finished
      if (!driving_) {
        drive(lock, [&] { return transfer.finished(); }, deadline, interrupt);
        continue;
      }
      if (background_drives_) station_->ring_own_mail();
      if (pump()) continue;
      if (interrupt != nullptr) interrupt->blocks();
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(kSlice, deadline - now_ns())));
      if (interrupt != nullptr && !transfer.finished()) {
        lock.unlock();
        const bool stop = interrupt->requested();
        lock.lock();
        if (stop) throw Error(ErrorKind::interrupted, "interrupted while waiting for a message");
      }
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    leave();
    throw;
  }
  leave();
  return transfer.finished();
}

void Messenger::drive(Lock& lock, const std::function<bool()>& done, Nanoseconds deadline,
                      Interrupt* interrupt) {
  driving_ = true;
  const auto hand_over = [this] {
    driving_ = false;
    // Not before: what a sleeper waited for is part of its report when the time is up.
    if (station_ != nullptr) station_->status().mail_peer.store(0, std::memory_order_relaxed);
    changed_.notify_all();
  };
  const auto together = [this] {
    const int peer = outstanding_.empty() ? kAnyRank : outstanding_.front()->envelope().peer;
    return peer != kAnyRank && peer != rank_ && station_->is_local(peer) && station_->on_core_of(peer) &&
           !station_->step_aside(next_aside_);
  };
  const int awaited = outstanding_.empty() ? kAnyRank : outstanding_.front()->envelope().peer;
  const int spins = station_->short_spins(awaited == kAnyRank ? rank_ : awaited);
  int idle = 0;
  int rounds = 0;
  Nanoseconds spin_end = 0;   // of a long spin under way, else 0
  Nanoseconds offer_end = 0;  // the same where the core is offered to others instead
  Nanoseconds next_look = now_ns() + kSlice / 2;
  try {
    while (!done()) {
      if (closing_) break;
      if (pump()) {
        if (spin_end != 0) spinning_.succeeded();
        spin_end = offer_end = 0;
        idle = 0;
        if (interrupt != nullptr && !done()) interrupt->blocks();  // it may be much that moves
        continue;
      }
      if (idle == spins && interrupt != nullptr) {
        const Nanoseconds now = now_ns();
        const Nanoseconds end = now + static_cast<Nanoseconds>(station_->tuning().spin_us) * 1000;
        if (spin_end == 0 && !together() && spinning_.worth_long(true)) spin_end = end;
        if (now < spin_end) {
          idle = 0;
          ++rounds;
        } else if (spin_end != 0) {
          spinning_.failed();
          spin_end = 0;
        } else {
          offer_end = end;
        }
      }
      if (idle < spins + kYields || (offer_end != 0 && now_ns() < offer_end)) {
        lock.unlock();
        if (idle == 0 && spin_end != 0 && rounds % Spinning::kRoundsToYield == 0) sched_yield();
        if (idle++ < spins) {
          relax_processor();
        } else {
          if (interrupt != nullptr) interrupt->blocks();
          sched_yield();
        }
        lock.lock();
        continue;
      }
      if (interrupt != nullptr) interrupt->blocks();
      doze(lock, std::min(deadline, nearest_deadline()));
      const Nanoseconds now = now_ns();
      if (station_ == nullptr || closing_) break;
      if (now < next_look && now < nearest_deadline() && now < deadline && !station_->broken()) continue;
      next_look = now + kSlice / 2;
      look_around();
      if (now >= deadline) break;
      if (interrupt == nullptr || done()) continue;
      lock.unlock();
      const std::string site = interrupt->site();
      const bool stop = interrupt->requested();
      lock.lock();
      if (station_ != nullptr && !closing_) station_->note_site(site);
      if (stop) throw Error(ErrorKind::interrupted, "interrupted while waiting for a message");
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    hand_over();
    throw;
  }
  hand_over();
}

void Messenger::doze(Lock& lock, Nanoseconds deadline) {
  MailBell& bell = station_->own().mail_bell;
  Status& status = station_->status();
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);  // the sleeper's half of the handshake
  const std::uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
  for (std::size_t r = 0; r < outgoing_.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    outgoing_[r].box->before_sleep();
    incoming_[r].box->before_sleep();
  }
  if (!pump() && !outstanding_.empty()) {
    const Transfer& first = *outstanding_.front();
    const int peer = first.envelope().peer;
    const bool sends = first.direction() == Transfer::Direction::send;
    status.mail_since.store(first.deadline() - first.timeout(), std::memory_order_relaxed);
    status.mail_tag.store(first.envelope().tag, std::memory_order_relaxed);
    status.mail_kind.store(sends ? 1 : 2, std::memory_order_relaxed);
    status.mail_peer.store(peer == kAnyRank ? kNobody : static_cast<std::uint32_t>(peer) + 1,
                           std::memory_order_relaxed);
    lock.unlock();
    futex_wait(bell.rings, rings, std::min(kSlice, deadline - now_ns()), FutexScope::machine);
    lock.lock();
  }
  bell.sleepers.fetch_sub(1, std::memory_order_release);
}

void Messenger::serve() {
  Lock lock(mutex_);
  int idle_ticks = 0;
  while (!closing_) {
    const bool needed = !outstanding_.empty();
    if (needed && !driving_ && waiters_ == 0) {
      idle_ticks = 0;
      background_drives_ = true;
      drive(lock, [this] { return closing_ || outstanding_.empty() || waiters_ > 0; }, kNever, nullptr);
      background_drives_ = false;
      continue;
    }
    idle_ticks = needed ? 0 : idle_ticks + 1;
    if (idle_ticks < kIdleTicks) {
      thread_wakes_.wait_for(lock, std::chrono::nanoseconds(kTick));
      continue;
    }
    background_awake_ = false;
    thread_wakes_.wait(lock, [this] { return closing_ || background_awake_; });
    idle_ticks = 0;
  }
}

// ---- ending
// -----------------------------------------------------------------------------------------------------

void Messenger::flush() {
  Lock lock(mutex_);
  const auto receives_nothing = [&](const TransferPointer& transfer) {
    return std::find(posted_.begin(), posted_.end(), transfer) != posted_.end();
  };
  ++waiters_;
  while (station_ != nullptr && !closing_) {
    pump();
    const bool busy =
        std::any_of(outstanding_.begin(), outstanding_.end(),
                    [&](const TransferPointer& transfer) { return !receives_nothing(transfer); });
    if (!busy) break;
    if (driving_) {
      if (background_drives_) station_->ring_own_mail();
      changed_.wait_for(lock, std::chrono::nanoseconds(kSlice));
      continue;
    }
    const std::size_t before = outstanding_.size();
    drive(lock, [&] { return outstanding_.size() < before; }, now_ns() + kSlice, nullptr);
  }
  --waiters_;
}

bool Messenger::close(Nanoseconds deadline) {
  {
    Lock lock(mutex_);
    if (station_ == nullptr) return true;
    closing_ = true;
    try {
      station_->check_unbroken();
      fail_all(Error(ErrorKind::aborted, prefix() + "the group was shut down"));
    } catch (const Error& cause) {
      fail_all(cause);
    }
    station_->ring_own_mail();
    changed_.notify_all();
    thread_wakes_.notify_all();
    while (driving_ && now_ns() < deadline) changed_.wait_for(lock, std::chrono::nanoseconds(kMillisecond));
    if (driving_) {
      thread_.abandon();
      return false;
    }
    station_ = nullptr;
    incoming_.clear();  // connections among them, which end before the courier does
    outgoing_.clear();
  }
  thread_.join();
  return true;
}

}  // namespace collectives
