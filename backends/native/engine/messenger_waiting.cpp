// Waiting for messages: progress, the background thread, failures, and the end.
#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/messenger.hpp"
#include "kernels/kernels.hpp"
#include "memory/futex.hpp"

namespace collectives {
namespace {

constexpr int kYields = 2;
// Where messages come without end, who takes them looks at the time and the interrupt hook, and gives the
// mutex away, once in so many pumps.
constexpr int kPumpsPerLook = 8;

// What a rank of another machine sent before its departure was reported has been received after this long.
constexpr Nanoseconds kInFlightLimit = kSecond;

// The background thread checks this often whether it is needed, while there is point-to-point traffic at all.
constexpr Nanoseconds kBackgroundTick = kMillisecond;
constexpr int kIdleTicks = 50;

}  // namespace

// ---- failing

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

// Lets the transfer touch its memory no more. Returns false where it goes on without: a message that has
// begun to leave.
bool Messenger::detach(Transfer& transfer) {
  if (transfer.direction() == Transfer::Direction::receive) {
    requeue(transfer);
  } else if (transfer.begun_) {
    try {
      if (transfer.rest_) return false;
      const std::uint64_t bytes = transfer.envelope().bytes;
      transfer.rest_ = std::make_unique_for_overwrite<std::byte[]>(bytes);  // what has left takes no memory
      collectives::copy(transfer.rest_.get() + transfer.moved_, transfer.data_ + transfer.moved_,
                        bytes - transfer.moved_);
      transfer.data_ = transfer.rest_.get();
      return false;
    } catch (const std::bad_alloc&) {
      context_->abort("rank " + std::to_string(rank_) + " has no memory for the rest of a message of " +
                      std::to_string(transfer.envelope().bytes) + " bytes whose sender was interrupted");
    }
  }
  withdraw(transfer);
  return true;
}

// Ends a transfer whose caller gets an exception instead.
void Messenger::take_back(const TransferPointer& transfer, const char* why) {
  if (transfer->finished()) return give_back(*transfer);
  if (detach(*transfer)) return finish(transfer, Error(ErrorKind::interrupted, why));
  try {
    wake_background();
  } catch (const Error&) {  // no thread: later calls help it on, the last of them when the group is shut down
  }
}

// One that has come whole.
std::shared_ptr<Messenger::Message> Messenger::message_of(const Envelope& envelope) {
  return std::make_shared<Message>(
      Message{envelope.peer, envelope.tag, envelope.dtype, envelope.bytes, envelope.bytes, {}, {}});
}

// The message of a finished receive, if it has got one.
void Messenger::give_back(const Transfer& transfer) {
  if (transfer.direction() == Transfer::Direction::send || transfer.error() != nullptr) return;
  Envelope envelope = transfer.envelope();
  envelope.peer = transfer.source_;
  offer(message_of(envelope), transfer.data_);
}

void Messenger::undo(Transfer& transfer) {
  const Lock lock(mutex_);
  take_back(transfer.shared_from_this(), "taken back, as its call was interrupted");
}

void Messenger::abandon(Transfer& transfer) {
  const Lock lock(mutex_);
  if (transfer.finished() || (transfer.direction() == Transfer::Direction::send && !transfer.suspended_))
    return;
  take_back(transfer.shared_from_this(), "taken back, as nobody can ask for it any more");
}

void Messenger::put_back(const Envelope& envelope, const std::byte* data) {
  const Lock lock(mutex_);
  offer(message_of(envelope), data);
}

void Messenger::fail_all(const Error& error) {
  posted_.clear();
  for (Outgoing& outgoing : outgoing_) outgoing.queue.clear();
  for (Incoming& incoming : incoming_) {
    if (incoming.current) incoming.current->receiver.reset();
  }
  while (!outstanding_.empty()) finish(outstanding_.front(), error);
}

void Messenger::fail_on_dead_leader() {
  const Topology& topology = context_->topology();
  if (!topology.spans_machines()) return;
  for (int machine = 0; machine < topology.count(); ++machine) {
    const int leader = topology.leader_of(machine);
    if (leader == rank_ || context_->departed(leader) || !context_->dead(leader)) continue;
    // Its machine and the others are not told any more what happens to each other.
    const Transfer& first = *outstanding_.front();
    context_->throw_peer_lost(leader, first.describe(), first.details());
  }
}

void Messenger::check_transfers() {
  try {
    context_->check_unbroken();
    context_->look_for_replaced();
    const auto ranks = static_cast<std::size_t>(context_->size());
    std::vector<bool> departed(ranks);
    std::vector<bool> dead(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (static_cast<int>(r) == rank_) continue;
      departed[r] = has_left(static_cast<int>(r));
      dead[r] = !departed[r] && context_->dead(static_cast<int>(r));
    }
    pump();  // what a rank sent before it went has come by now, or never will
    if (!outstanding_.empty()) fail_on_dead_leader();
    const std::list<TransferPointer> transfers = outstanding_;
    for (const TransferPointer& transfer : transfers) {
      if (transfer->finished()) continue;
      const int peer = transfer->envelope().peer;
      bool somebody = peer == rank_ || (peer == kAnyRank && ranks == 1);  // who could still complete it
      for (std::size_t r = 0; r < ranks; ++r) {
        const int rank = static_cast<int>(r);
        if (rank == rank_ || (peer != kAnyRank && peer != rank)) continue;
        if (dead[r]) context_->throw_peer_lost(rank, transfer->describe(), transfer->details());
        if (!departed[r]) check_connections(*transfer, rank);
        somebody = somebody || !departed[r];
      }
      if (!somebody) {
        withdraw(*transfer);
        const char* who = peer == kAnyRank ? "all other ranks have" : "that rank has";
        finish(transfer,
               Error(ErrorKind::peer_lost,
                     context_->prefix() + ": " + transfer->describe() + ": " + who + " left the group",
                     transfer->details()));
      } else if (now_ns() >= transfer->deadline()) {
        fail_timed_out(transfer);
      }
    }
  } catch (const Error& error) {
    fail_all(error);
  }
}

// Whether the rank has left and nothing of it is in flight any more. Departures are reported apart from
// messages.
bool Messenger::has_left(int rank) {
  if (!context_->departed(rank)) return false;
  if (context_->topology().is_local(rank)) return true;
  Incoming& incoming = incoming_[static_cast<std::size_t>(rank)];
  const Nanoseconds now = now_ns();
  if (incoming.departed == 0) incoming.departed = now;
  return incoming.box->ended() != 0 || now >= incoming.departed + kInFlightLimit;
}

// A connection that ended while its rank goes on is not made again. Other ends of connections have a cause
// that is reported within a moment: also a departure, which may be known before all that came with it.
void Messenger::check_connections(const Transfer& transfer, int rank) const {
  const bool sends = transfer.direction() == Transfer::Direction::send;
  const Outbox& out = *outgoing_[static_cast<std::size_t>(rank)].box;
  const Inbox& in = *incoming_[static_cast<std::size_t>(rank)].box;
  const Nanoseconds ended = sends ? out.ended() : in.ended();
  if (ended == 0 || now_ns() < ended + kInFlightLimit || context_->departed(rank)) return;
  context_->throw_disconnected(
      rank, transfer.describe() + " (" + (sends ? out.error_text() : in.error_text()) + ")",
      transfer.details());
}

void Messenger::fail_timed_out(const TransferPointer& transfer) {
  const ErrorDetails about = transfer->awaited(*context_);
  const auto text = [&](const std::string& state) {
    return context_->timeout_text(transfer->describe(), transfer->timeout(), state);
  };
  const auto fail = [&](const std::string& what) {
    finish(transfer, Error(ErrorKind::timeout, context_->prefix() + ": " + what, about));
  };
  const std::string bytes = std::to_string(transfer->envelope().bytes) + " bytes";
  if (transfer->direction() == Transfer::Direction::receive) {
    const std::optional<std::uint64_t> come = requeue(*transfer);
    withdraw(*transfer);
    if (!come) return fail(text("; nothing of a message had come, and the group stays usable"));
    return fail(text("; " + std::to_string(*come) + " of " + bytes +
                     " had come, which the next receive gets with the rest, and the group stays usable"));
  }
  if (!transfer->begun_) {
    withdraw(*transfer);
    std::string why = outgoing_[static_cast<std::size_t>(about.rank)].box->error_text();
    if (!why.empty()) why = " (" + why + ")";
    return fail(text("; nothing of it had left" + why + ", and the group stays usable"));
  }
  // A message that has left in part can be neither taken back nor completed: its memory is the caller's
  // again.
  const std::string what =
      text("; " + std::to_string(transfer->moved_) + " of " + bytes +
           " were on their way and cannot be taken back, so that the group is broken: make a new one, with a "
           "longer timeout or with the receive issued earlier");
  context_->fail_group(ErrorKind::timeout, what, about);
  withdraw(*transfer);
  fail(what);
  context_->check_unbroken();
}

// What has come for a receive that gives up is not lost with it, as the sender counts on its arrival: the
// message waits for the next receive, or goes to one that waits already. Returns how much of it had come.
std::optional<std::uint64_t> Messenger::requeue(const Transfer& transfer) {
  const auto found = std::find_if(incoming_.begin(), incoming_.end(), [&](const Incoming& incoming) {
    return incoming.current && incoming.current->receiver.get() == &transfer;
  });
  if (found == incoming_.end()) return std::nullopt;
  const std::shared_ptr<Message> message = found->current;
  message->receiver.reset();
  const std::uint64_t come = message->received;
  offer(message, transfer.data_);
  return come;
}

// Keeps what has come of a message, the oldest of its sender, for the next receive.
void Messenger::offer(const std::shared_ptr<Message>& message, const std::byte* data) {
  if (context_ == nullptr || closing_ || !buffer_unexpected(*message)) return;
  collectives::copy(message->memory.get(), data, message->received);
  unexpected_.push_front(message);
  const auto next = std::find_if(posted_.begin(), posted_.end(), [&](const TransferPointer& other) {
    return wants(other->envelope(), *message);
  });
  if (next != posted_.end()) match_unexpected(TransferPointer(*next));
}

// ---- suspending

// Whether a later one has been issued that would change places with it.
bool Messenger::overtaken(const Transfer& transfer) const {
  const Envelope& mine = transfer.envelope();
  if (transfer.direction() == Transfer::Direction::send) {
    const std::deque<TransferPointer>& queue = outgoing_[static_cast<std::size_t>(mine.peer)].queue;
    return !transfer.begun_ && !queue.empty() && queue.back().get() != &transfer;
  }
  return std::any_of(posted_.begin(), posted_.end(), [&](const TransferPointer& other) {
    const Envelope& theirs = other->envelope();
    return other->ticket_.index > transfer.ticket_.index && theirs.tag == mine.tag &&
           (theirs.peer == mine.peer || theirs.peer == kAnyRank || mine.peer == kAnyRank);
  });
}

void Messenger::suspend(Transfer& transfer) {
  if (transfer.waiters_ > 1 || transfer.notifies() || overtaken(transfer)) return;
  if (!transfer.finished()) {
    transfer.suspended_ = detach(transfer);
  } else if (transfer.direction() == Transfer::Direction::receive && transfer.error() == nullptr &&
             transfer.unfinish()) {
    transfer.suspended_ = true;
    begin(transfer);
    outstanding_.push_back(transfer.shared_from_this());
    give_back(transfer);
  }
}

void Messenger::rest(Transfer& transfer) {
  const Lock lock(mutex_);
  if (context_ != nullptr && !closing_) suspend(transfer);
}

void Messenger::resume(Transfer& transfer) {
  if (!transfer.suspended_) return;
  transfer.suspended_ = false;
  if (transfer.finished()) return;
  const TransferPointer self = transfer.shared_from_this();
  if (transfer.direction() == Transfer::Direction::send) {
    outgoing_[static_cast<std::size_t>(transfer.envelope().peer)].queue.push_back(self);
    return;
  }
  const auto later = std::find_if(posted_.begin(), posted_.end(), [&](const TransferPointer& other) {
    return other->ticket_.index > transfer.ticket_.index;
  });
  posted_.insert(later, self);
  match_unexpected(self);
}

// ---- waiting

Nanoseconds Messenger::nearest_deadline() const {
  Nanoseconds nearest = kNever;
  for (const TransferPointer& transfer : outstanding_) nearest = std::min(nearest, transfer->deadline());
  return nearest;
}

void Messenger::poll(Transfer& transfer) {
  const Lock lock(mutex_);
  resume(transfer);
  if (context_ != nullptr && !closing_) pump();
}

bool Messenger::wait(Transfer& transfer, Nanoseconds deadline, Interrupt* interrupt) {
  Lock lock(mutex_);
  resume(transfer);
  ++transfer.waiters_;
  try {
    const bool finished = wait(lock, transfer, deadline, interrupt);
    --transfer.waiters_;
    return finished;
  } catch (...) {
    suspend(transfer);
    --transfer.waiters_;
    throw;
  }
}

bool Messenger::wait(Lock& lock, Transfer& transfer, Nanoseconds deadline, Interrupt* interrupt) {
  ++waiters_;
  int pumps = 0;
  const auto leave = [&] {
    --waiters_;
    changed_.notify_all();
  };
  try {
    while (!transfer.finished() && now_ns() < deadline) {
      if (context_ == nullptr) break;  // closed: everything is finished
      if (!progress_running_) {
        run_progress(lock, [&] { return transfer.finished(); }, deadline, interrupt);
        continue;
      }
      if (background_runs_) context_->ring_own_mail();
      if (pump() && (transfer.finished() || ++pumps % kPumpsPerLook != 0)) continue;
      if (interrupt != nullptr) interrupt->blocks();
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(kLongestSleep, deadline - now_ns())));
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

void Messenger::run_progress(Lock& lock, const std::function<bool()>& done, Nanoseconds deadline,
                             Interrupt* interrupt) {
  progress_running_ = true;
  const auto hand_over = [this] {
    progress_running_ = false;
    // Not before: what a sleeper waited for is part of its report when the time is up.
    if (context_ != nullptr) context_->status().mail_peer.store(0, std::memory_order_relaxed);
    changed_.notify_all();
  };
  const auto sharing_core = [this] {
    const int peer = outstanding_.empty() ? kAnyRank : outstanding_.front()->envelope().peer;
    return peer != kAnyRank && peer != rank_ && context_->is_local(peer) &&
           context_->shares_core_with(RankContext::Wait::work, peer) &&
           !context_->leave_core(next_core_change_);
  };
  const int awaited = outstanding_.empty() ? kAnyRank : outstanding_.front()->envelope().peer;
  const int spins = context_->short_spins(RankContext::Wait::work, awaited == kAnyRank ? rank_ : awaited);
  int idle = 0;
  int rounds = 0;
  int pumps = 0;
  Nanoseconds spin_end = 0;   // of a long spin under way, else 0
  Nanoseconds offer_end = 0;  // the same where the core is offered to others instead
  Nanoseconds next_check = now_ns() + kLongestSleep / 2;
  try {
    while (!done()) {
      if (closing_) break;
      const bool moved = pump();
      if (moved) {
        if (spin_end != 0) spin_policy_.succeeded();
        spin_end = offer_end = 0;
        idle = 0;
        if (interrupt != nullptr && !done()) interrupt->blocks();  // it may be much that moves
        if (++pumps % kPumpsPerLook != 0) continue;
      }
      if (!moved && idle == spins && interrupt != nullptr) {
        const Nanoseconds now = now_ns();
        const Nanoseconds end = now + static_cast<Nanoseconds>(context_->tuning().spin_us) * 1000;
        if (spin_end == 0 && !sharing_core() && spin_policy_.should_spin_long(true)) spin_end = end;
        if (now < spin_end) {
          idle = 0;
          ++rounds;
        } else if (spin_end != 0) {
          spin_policy_.failed();
          spin_end = 0;
        } else {
          offer_end = end;
        }
      }
      if (!moved && (idle < spins + kYields || (offer_end != 0 && now_ns() < offer_end))) {
        lock.unlock();
        if (idle == 0 && spin_end != 0 && rounds % SpinPolicy::kRoundsToYield == 0) sched_yield();
        if (idle++ < spins) {
          relax_processor();
        } else {
          if (interrupt != nullptr) interrupt->blocks();
          sched_yield();
        }
        lock.lock();
        continue;
      }
      if (moved) {
        lock.unlock();
        lock.lock();
      } else {
        if (interrupt != nullptr) interrupt->blocks();
        sleep_on_doorbell(lock, std::min(deadline, nearest_deadline()));
      }
      const Nanoseconds now = now_ns();
      if (context_ == nullptr || closing_) break;
      if (now < next_check && now < nearest_deadline() && now < deadline && !context_->broken()) continue;
      next_check = now + kLongestSleep / 2;
      check_transfers();
      if (now >= deadline) break;
      if (interrupt == nullptr || done()) continue;
      lock.unlock();
      const std::string site = interrupt->site();
      const bool stop = interrupt->requested();
      lock.lock();
      if (context_ != nullptr && !closing_) context_->note_site(site);
      if (stop) throw Error(ErrorKind::interrupted, "interrupted while waiting for a message");
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    hand_over();
    throw;
  }
  hand_over();
}

void Messenger::sleep_on_doorbell(Lock& lock, Nanoseconds deadline) {
  MailDoorbell& bell = context_->own().mail_doorbell;
  Status& status = context_->status();
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);  // the sleeper's half of the handshake
  const std::uint32_t rings = bell.rings.load(std::memory_order_acquire);  // before the pump below
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
    status.mail_direction.store(
        static_cast<std::uint32_t>(sends ? MailDirection::send : MailDirection::receive),
        std::memory_order_relaxed);
    status.mail_peer.store(peer == kAnyRank ? kNobody : static_cast<std::uint32_t>(peer) + 1,
                           std::memory_order_relaxed);
    lock.unlock();
    futex_wait(bell.rings, rings, std::min(kLongestSleep, deadline - now_ns()), FutexScope::machine);
    lock.lock();
  }
  // Relaxed: whoever sleeps next counts itself again before its last look.
  bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Messenger::run_background() {
  Lock lock(mutex_);
  int idle_ticks = 0;
  while (!closing_) {
    const bool needed = !outstanding_.empty();
    if (needed && !progress_running_ && waiters_ == 0) {
      idle_ticks = 0;
      background_runs_ = true;
      run_progress(
          lock, [this] { return closing_ || outstanding_.empty() || waiters_ > 0; }, kNever, nullptr);
      background_runs_ = false;
      continue;
    }
    idle_ticks = needed ? 0 : idle_ticks + 1;
    if (idle_ticks < kIdleTicks) {
      thread_wakes_.wait_for(lock, std::chrono::nanoseconds(kBackgroundTick));
      continue;
    }
    background_awake_ = false;
    thread_wakes_.wait(lock, [this] { return closing_ || background_awake_; });
    idle_ticks = 0;
  }
}

// ---- ending

void Messenger::flush() {
  Lock lock(mutex_);
  const auto receives_nothing = [&](const TransferPointer& transfer) {
    return transfer->suspended_ || std::find(posted_.begin(), posted_.end(), transfer) != posted_.end();
  };
  ++waiters_;
  while (context_ != nullptr && !closing_) {
    pump();
    const bool busy =
        std::any_of(outstanding_.begin(), outstanding_.end(),
                    [&](const TransferPointer& transfer) { return !receives_nothing(transfer); });
    if (!busy) break;
    if (progress_running_) {
      if (background_runs_) context_->ring_own_mail();
      changed_.wait_for(lock, std::chrono::nanoseconds(kLongestSleep));
      continue;
    }
    const std::size_t before = outstanding_.size();
    run_progress(lock, [&] { return outstanding_.size() < before; }, now_ns() + kLongestSleep, nullptr);
  }
  --waiters_;
}

bool Messenger::close(Nanoseconds deadline) {
  {
    Lock lock(mutex_);
    if (context_ == nullptr) return true;
    closing_ = true;
    try {
      context_->check_unbroken();
      fail_all(Error(ErrorKind::aborted, context_->prefix() + ": the group was shut down"));
    } catch (const Error& cause) {
      fail_all(cause);
    }
    context_->ring_own_mail();
    changed_.notify_all();
    thread_wakes_.notify_all();
    while (progress_running_ && now_ns() < deadline)
      changed_.wait_for(lock, std::chrono::nanoseconds(kMillisecond));
    if (progress_running_) {
      thread_.abandon();
      return false;
    }
    context_ = nullptr;
    incoming_.clear();  // connections among them, which end before the connections does
    outgoing_.clear();
  }
  thread_.join();
  return true;
}

}  // namespace collectives
