#include "engine/messenger.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/kernels.hpp"
#include "memory/futex.hpp"

namespace collectives {
namespace {

// What precedes the bytes of a message in a stream. Messages are padded to a multiple of its size.
struct Frame {
  std::uint64_t bytes = 0;
  std::uint32_t tag = 0;
  std::uint8_t dtype = 0;
  std::uint8_t reserved[3] = {};
};
static_assert(sizeof(Frame) == 16);

// Bytes between two publications, so that the receiver copies while the sender does.
constexpr std::size_t kStride = 64 << 10;

constexpr Nanoseconds kSlice = 100 * kMillisecond;
constexpr int kSpins = 100;
constexpr int kYields = 2;

// How long a caller drives its own transfer before the background thread is made ready to. Signals wait that
// long too.
constexpr Nanoseconds kPatience = 20 * kMillisecond;

// What another machine sent before its news came has come after this long.
constexpr Nanoseconds kOnItsWay = kSecond;

// The background thread looks this often whether it is needed, while there is point-to-point traffic at all.
constexpr Nanoseconds kTick = kMillisecond;
constexpr int kIdleTicks = 50;

std::size_t padding_of(std::uint64_t bytes) noexcept {
  return static_cast<std::size_t>((sizeof(Frame) - bytes % sizeof(Frame)) % sizeof(Frame));
}

}  // namespace

Messenger::Messenger(Station& station)
    : station_(&station), rank_(station.rank()), spinning_(station.spinning_hope()) {
  incoming_.reserve(static_cast<std::size_t>(station.size()));
  outgoing_.reserve(static_cast<std::size_t>(station.size()));
  for (int r = 0; r < station.size(); ++r) {
    if (r == rank_) {
      incoming_.emplace_back();
      outgoing_.emplace_back();
      continue;
    }
    incoming_.push_back({inbox_from(station, r), 0, nullptr});
    outgoing_.push_back({outbox_to(station, r), {}});
  }
}

// ---- posting
// ----------------------------------------------------------------------------------------------------

std::shared_ptr<Transfer> Messenger::send(const Envelope& envelope, const std::byte* data,
                                          Nanoseconds timeout, Interrupt* caller) {
  // The bytes of a send are only read; the type is shared with receives.
  auto transfer = std::make_shared<Transfer>(shared_from_this(), Transfer::Direction::send, envelope,
                                             const_cast<std::byte*>(data), timeout);
  Lock lock(mutex_);
  check_open();
  if (envelope.peer == rank_) {
    send_to_self(transfer);
    return transfer;
  }
  outstanding_.push_back(transfer);
  outgoing_[static_cast<std::size_t>(envelope.peer)].queue.push_back(transfer);
  start(lock, transfer, caller);
  return transfer;
}

std::shared_ptr<Transfer> Messenger::receive(const Envelope& envelope, std::byte* data, Nanoseconds timeout,
                                             Interrupt* caller) {
  auto transfer =
      std::make_shared<Transfer>(shared_from_this(), Transfer::Direction::receive, envelope, data, timeout);
  Lock lock(mutex_);
  check_open();
  outstanding_.push_back(transfer);
  posted_.push_back(transfer);
  match_unexpected(transfer);
  start(lock, transfer, caller);
  return transfer;
}

void Messenger::check_open() const {
  if (station_ == nullptr || closing_) {
    throw Error(ErrorKind::aborted, "[rank " + std::to_string(rank_) + "] the group was shut down");
  }
  station_->check_usable();
}

void Messenger::start(Lock& lock, const TransferPointer& transfer, Interrupt* caller) {
  pump();
  if (caller != nullptr && !transfer->finished()) wait(lock, *transfer, now_ns() + kPatience, caller);
  if (transfer->finished() || background_awake_) return;
  if (!thread_.started()) thread_.start("collectives-p2p", [this] { serve(); });
  background_awake_ = true;
  thread_wakes_.notify_one();
}

void Messenger::send_to_self(const TransferPointer& transfer) {
  const Envelope& envelope = transfer->envelope();
  auto message =
      std::make_shared<Message>(Message{rank_, envelope.tag, envelope.dtype, envelope.bytes, 0, {}, {}});
  const auto matches = [&](const TransferPointer& posted) {
    const Envelope& wanted = posted->envelope();
    return (wanted.peer == kAnyRank || wanted.peer == rank_) && wanted.tag == envelope.tag;
  };
  const auto posted = std::find_if(posted_.begin(), posted_.end(), matches);
  if (posted == posted_.end()) {
    message->memory = std::make_unique_for_overwrite<std::byte[]>(envelope.bytes);
    std::memcpy(message->memory.get(), transfer->data_, envelope.bytes);
    message->come = envelope.bytes;
    unexpected_.push_back(std::move(message));
  } else {
    attach(message, *posted);
    if (message->receiver) {
      std::memcpy(message->receiver->data_, transfer->data_, envelope.bytes);
      message->come = envelope.bytes;
      complete(message);
    }
  }
  finish(transfer, std::nullopt);
}

void Messenger::match_unexpected(const TransferPointer& transfer) {
  const Envelope& wanted = transfer->envelope();
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const auto& message) {
    return (wanted.peer == kAnyRank || wanted.peer == message->source) && wanted.tag == message->tag;
  });
  if (found == unexpected_.end()) return;
  const std::shared_ptr<Message> message = *found;
  unexpected_.erase(found);
  const std::unique_ptr<std::byte[]> memory = std::move(message->memory);
  attach(message, transfer);
  if (!message->receiver) return;
  collectives::copy(transfer->data_, memory.get(), message->come);
  if (message->come == message->bytes) complete(message);
}

// ---- pumping
// ----------------------------------------------------------------------------------------------------

bool Messenger::pump() {
  bool moved = false;
  for (std::size_t r = 0; r < outgoing_.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    if (!outgoing_[r].queue.empty()) moved |= pump_out(outgoing_[r]);
    moved |= pump_in(static_cast<int>(r), incoming_[r]);
  }
  return moved;
}

bool Messenger::pump_out(Outgoing& outgoing) {
  bool moved = false;
  while (!outgoing.queue.empty()) {
    const TransferPointer transfer = outgoing.queue.front();
    std::size_t room = 0;
    try {
      room = outgoing.box->room();
    } catch (const Error& error) {  // no memory for the ring: nothing has left yet
      outgoing.queue.pop_front();
      finish(transfer, Error(error.kind(), prefix() + transfer->describe() + ": " + error.message()));
      moved = true;
      continue;
    }
    const Envelope& envelope = transfer->envelope();
    if (transfer->begun_ && transfer->moved_ == envelope.bytes) {  // the last of it was still on its way
      if (!outgoing.box->flushed()) return moved;
      outgoing.queue.pop_front();
      finish(transfer, std::nullopt);
      moved = true;
      continue;
    }
    if (room == 0) return moved;
    if (!transfer->begun_) {
      const Frame frame{
          .bytes = envelope.bytes, .tag = envelope.tag, .dtype = static_cast<std::uint8_t>(envelope.dtype)};
      outgoing.box->write(&frame, sizeof(frame));
      transfer->begun_ = true;
      room -= sizeof(Frame);
    }
    const std::uint64_t left = envelope.bytes - transfer->moved_;
    const auto stride = static_cast<std::size_t>(std::min<std::uint64_t>({left, room, kStride}));
    if (stride > 0) outgoing.box->write(transfer->data_ + transfer->moved_, stride);
    transfer->moved_ += stride;
    // All positions but a message's last are multiples of the padding, so there is room for it where there is
    // for that byte.
    const bool whole = transfer->moved_ == envelope.bytes;
    if (whole) outgoing.box->pad(padding_of(envelope.bytes));
    outgoing.box->publish();
    if (whole && outgoing.box->flushed()) {
      outgoing.queue.pop_front();
      finish(transfer, std::nullopt);
    }
    moved = true;
  }
  return moved;
}

bool Messenger::pump_in(int source, Incoming& incoming) {
  bool moved = false;
  for (;;) {
    std::size_t available = incoming.box->available();
    if (!incoming.current) {
      // Where nothing is outstanding, no later message needs what this one holds up: it stays in the stream
      // until its receive is posted, which saves its bytes a detour through memory of their own.
      if (available < sizeof(Frame) || outstanding_.empty()) return moved;
      incoming.current = open_message(source, *incoming.box);
      available -= sizeof(Frame);
      moved = true;
    }
    const std::shared_ptr<Message> message = incoming.current;
    const std::uint64_t left = message->bytes - message->come;
    const auto stride = static_cast<std::size_t>(std::min<std::uint64_t>({left, available, kStride}));
    if (stride == 0 && left > 0) return moved;
    std::byte* target = message->receiver ? message->receiver->data_ : message->memory.get();
    if (target != nullptr) {
      incoming.box->read(target + message->come, stride);
    } else {
      incoming.box->skip(stride);
    }
    message->come += stride;
    if (message->come == message->bytes) {
      incoming.box->pad(padding_of(message->bytes));
      incoming.current.reset();
      if (message->receiver) complete(message);
    }
    incoming.box->publish();
    moved = true;
  }
}

std::shared_ptr<Messenger::Message> Messenger::open_message(int source, Inbox& box) {
  Frame frame;
  box.read(&frame, sizeof(frame));
  auto message = std::make_shared<Message>(
      Message{source, frame.tag, static_cast<DType>(frame.dtype), frame.bytes, 0, {}, {}});
  const auto posted = std::find_if(posted_.begin(), posted_.end(), [&](const TransferPointer& transfer) {
    const Envelope& wanted = transfer->envelope();
    return (wanted.peer == kAnyRank || wanted.peer == source) && wanted.tag == frame.tag;
  });
  if (posted == posted_.end()) {
    try {
      message->memory = std::make_unique_for_overwrite<std::byte[]>(frame.bytes);
    } catch (const std::bad_alloc&) {
      station_->abort("rank " + std::to_string(rank_) + " has no memory for a message of " +
                      std::to_string(frame.bytes) + " bytes from rank " + std::to_string(source) +
                      " for which no receive is posted yet");
      return message;
    }
    unexpected_.push_back(message);
  } else {
    attach(message, *posted);
  }
  return message;
}

void Messenger::attach(const std::shared_ptr<Message>& message, TransferPointer transfer) {
  posted_.remove(transfer);
  const Envelope& wanted = transfer->envelope();
  if (wanted.bytes != message->bytes || wanted.dtype != message->dtype) {
    // The message has no target now, so its bytes are dropped as they come.
    finish(transfer,
           Error(ErrorKind::mismatch,
                 prefix() + transfer->describe() + " met a message of " + std::to_string(message->bytes) +
                     " bytes (" + name_of(message->dtype) + ") from rank " + std::to_string(message->source) +
                     "; the message is dropped and the group stays usable"));
    return;
  }
  transfer->source_ = message->source;
  message->receiver = std::move(transfer);
}

void Messenger::complete(const std::shared_ptr<Message>& message) { finish(message->receiver, std::nullopt); }

void Messenger::finish(const TransferPointer& transfer, std::optional<Error> error) {
  const TransferPointer alive = transfer;  // the lists may hold the last reference
  outstanding_.remove(alive);
  alive->finish(std::move(error));
  if (waiters_ > 0) changed_.notify_all();
}

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
  const std::string text = transfer->describe() + " was not done after " +
                           std::to_string(transfer->timeout() / kMillisecond) + " ms. Every rank:\n" +
                           station_->report();
  if (transfer->begun_) {
    // A message that has left in part can be neither taken back nor completed: its memory is the caller's
    // again.
    station_->poison(ErrorKind::timeout, peer, text);
    station_->check_unbroken();
  }
  withdraw(*transfer);
  finish(transfer, Error(ErrorKind::timeout, prefix() + text, peer));
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
  int idle = 0;
  Nanoseconds spin_end = 0;  // of a long spin under way, else 0
  Nanoseconds next_look = now_ns() + kSlice / 2;
  try {
    while (!done()) {
      if (closing_) break;
      if (pump()) {
        if (spin_end != 0) spinning_.succeeded();
        spin_end = 0;
        idle = 0;
        if (interrupt != nullptr && !done()) interrupt->blocks();  // it may be much that moves
        continue;
      }
      if (idle == kSpins && interrupt != nullptr && (spin_end != 0 || spinning_.worth_long())) {
        const Nanoseconds now = now_ns();
        if (spin_end == 0) spin_end = now + static_cast<Nanoseconds>(station_->tuning().spin_us) * 1000;
        if (now < spin_end) {
          idle = 0;
        } else {
          spinning_.failed();
          spin_end = 0;
        }
      }
      if (idle < kSpins + kYields) {
        lock.unlock();
        if (idle++ < kSpins) {
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
