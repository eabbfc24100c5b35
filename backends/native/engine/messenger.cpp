#include "engine/messenger.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/kernels.hpp"
#include "memory/futex.hpp"
#include "transport/shm_mailbox.hpp"
#include "transport/tcp_mailbox.hpp"

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

// Messages of at most this many bytes may go without a transfer, whose cost would be felt.
constexpr std::uint64_t kShortMessage = 4 << 10;

// Bytes between two publications, so that the receiver copies while the sender does.
constexpr std::size_t kStride = 64 << 10;

// Bytes taken from one sender before the others and the time have their turn, so that a sender that is as
// fast as this rank does not keep it for ever. A ring is no longer: one pump takes all that it holds.
constexpr std::size_t kMostPerPump = 1 << 20;

std::size_t padding_of(std::uint64_t bytes) noexcept {
  return static_cast<std::size_t>((sizeof(Frame) - bytes % sizeof(Frame)) % sizeof(Frame));
}

}  // namespace

Messenger::Messenger(RankContext& context, ConnectionManager* connections,
                     std::shared_ptr<OperationRecord> record)
    : context_(&context),
      rank_(context.rank()),
      record_(std::move(record)),
      spin_policy_(context.spin_likelihood(RankContext::Wait::work)) {
  incoming_.reserve(static_cast<std::size_t>(context.size()));
  outgoing_.reserve(static_cast<std::size_t>(context.size()));
  for (int r = 0; r < context.size(); ++r) {
    if (r == rank_) {
      incoming_.emplace_back();
      outgoing_.emplace_back();
      continue;
    }
    if (context.is_local(r)) {
      incoming_.push_back({std::make_unique<ShmInbox>(context, r), 0, nullptr});
      outgoing_.push_back({std::make_unique<ShmOutbox>(context, r), {}});
    } else {
      incoming_.push_back({std::make_unique<TcpInbox>(*connections, r, rank_), 0, nullptr});
      outgoing_.push_back({std::make_unique<TcpOutbox>(*connections, rank_, r), {}});
    }
  }
}

// ---- posting

std::shared_ptr<Transfer> Messenger::send(const Envelope& envelope, const std::byte* data,
                                          Nanoseconds timeout, Owner owner, Interrupt* caller) {
  // The bytes of a send are only read; the type is shared with receives.
  auto transfer = std::make_shared<Transfer>(shared_from_this(), Transfer::Direction::send, envelope,
                                             const_cast<std::byte*>(data), timeout, std::move(owner));
  Lock lock(mutex_);
  check_open();
  begin(*transfer);
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
                                             Owner owner, Interrupt* caller) {
  auto transfer = std::make_shared<Transfer>(shared_from_this(), Transfer::Direction::receive, envelope, data,
                                             timeout, std::move(owner));
  Lock lock(mutex_);
  check_open();
  begin(*transfer);
  outstanding_.push_back(transfer);
  posted_.push_back(transfer);
  match_unexpected(transfer);
  start(lock, transfer, caller);
  return transfer;
}

bool Messenger::send_at_once(const Envelope& envelope, const std::byte* data, Nanoseconds timeout) {
  if (envelope.bytes > kShortMessage || envelope.peer == rank_) return false;
  const Lock lock(mutex_);
  check_open();
  context_->note_core();
  Outgoing& outgoing = outgoing_[static_cast<std::size_t>(envelope.peer)];
  if (!outgoing.queue.empty() || !context_->is_local(envelope.peer)) return false;
  const std::size_t padding = padding_of(envelope.bytes);
  try {
    if (!outgoing.box->has_room(sizeof(Frame) + envelope.bytes + padding)) return false;
  } catch (const Error&) {  // no memory for the ring: `send` tells
    return false;
  }
  write_frame(*outgoing.box, envelope);
  outgoing.box->write(data, envelope.bytes);
  outgoing.box->pad(padding);
  outgoing.box->publish();
  record_at_once(true, envelope, timeout);
  return true;
}

bool Messenger::receive_at_once(const Envelope& envelope, std::byte* data, Nanoseconds timeout) {
  if (envelope.bytes > kShortMessage || envelope.peer == rank_) return false;
  const std::size_t padding = padding_of(envelope.bytes);
  Lock lock(mutex_);
  check_open();
  context_->note_core();
  const int spins = context_->short_spins(RankContext::Wait::work, envelope.peer);
  for (int i = 0; i < spins; ++i) {
    const Incoming& incoming = incoming_[static_cast<std::size_t>(envelope.peer)];
    // Whatever else waits for messages, or came before, goes first.
    if (!posted_.empty() || !unexpected_.empty() || incoming.current || !context_->is_local(envelope.peer)) {
      return false;
    }
    Inbox& box = *incoming.box;
    if (box.available() >= sizeof(Frame)) {
      Frame frame;
      box.peek(&frame, sizeof(frame));
      if (frame.tag != envelope.tag || frame.bytes != envelope.bytes ||
          frame.dtype != static_cast<std::uint8_t>(envelope.dtype)) {
        return false;
      }
      if (box.available() >= sizeof(Frame) + envelope.bytes) {
        box.skip(sizeof(Frame));
        box.read(data, envelope.bytes);
        box.pad(padding);
        box.publish();
        record_at_once(false, envelope, timeout);
        return true;
      }
    }
    lock.unlock();
    relax_processor();
    lock.lock();
    check_open();
  }
  return false;
}

void Messenger::check_open() const {
  if (context_ == nullptr || closing_) {
    throw Error(ErrorKind::aborted, "[rank " + std::to_string(rank_) + "] the group was shut down");
  }
  context_->check_usable();
}

void Messenger::begin(Transfer& transfer) {
  const bool sends = transfer.direction() == Transfer::Direction::send;
  transfer.ticket_ = record_->messages.begin(record_of(
      sends, transfer.envelope(), record_->messages.begun() + 1, transfer.timeout(), transfer.began()));
}

// One look at the clock is all that such a message gets: it began when it ended.
void Messenger::record_at_once(bool sends, const Envelope& envelope, Nanoseconds timeout) {
  const Nanoseconds now = now_ns();
  const RecordTicket ticket =
      record_->messages.begin(record_of(sends, envelope, record_->messages.begun() + 1, timeout, now));
  record_->messages.end(ticket, now);
}

void Messenger::start(Lock& lock, const TransferPointer& transfer, Interrupt* caller) {
  try {
    context_->note_core();
    pump();
    if (transfer->finished()) return;
    if (caller != nullptr) {
      wait(lock, *transfer, kNever, caller);
    } else {
      wake_background();
    }
  } catch (...) {
    take_back(transfer, "taken back, as its call was interrupted");
    throw;
  }
}

void Messenger::wake_background() {
  if (background_awake_) return;
  if (!thread_.started()) thread_.start("collectives-p2p", [this] { run_background(); });
  background_awake_ = true;
  thread_wakes_.notify_one();
}

void Messenger::send_to_self(const TransferPointer& transfer) {
  const Envelope& envelope = transfer->envelope();
  auto message =
      std::make_shared<Message>(Message{rank_, envelope.tag, envelope.dtype, envelope.bytes, 0, {}, {}});
  const auto posted = std::find_if(posted_.begin(), posted_.end(), [&](const TransferPointer& receive) {
    return wants(receive->envelope(), *message);
  });
  if (posted == posted_.end()) {
    message->memory = std::make_unique_for_overwrite<std::byte[]>(envelope.bytes);
    std::memcpy(message->memory.get(), transfer->data_, envelope.bytes);
    message->received = envelope.bytes;
    unexpected_.push_back(std::move(message));
  } else {
    attach(message, *posted);
    if (message->receiver) {
      std::memcpy(message->receiver->data_, transfer->data_, envelope.bytes);
      message->received = envelope.bytes;
      complete(message);
    }
  }
  finish(transfer, std::nullopt);
}

void Messenger::match_unexpected(const TransferPointer& transfer) {
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(),
                                  [&](const auto& message) { return wants(transfer->envelope(), *message); });
  if (found == unexpected_.end()) return;
  const std::shared_ptr<Message> message = std::move(*found);
  unexpected_.erase(found);
  const std::unique_ptr<std::byte[]> memory = std::move(message->memory);
  attach(message, transfer);
  if (!message->receiver) return;
  collectives::copy(transfer->data_, memory.get(), message->received);
  if (message->received == message->bytes) complete(message);
}

// ---- pumping

void Messenger::write_frame(Outbox& box, const Envelope& envelope) {
  const Frame frame{
      .bytes = envelope.bytes, .tag = envelope.tag, .dtype = static_cast<std::uint8_t>(envelope.dtype)};
  box.write(&frame, sizeof(frame));
}

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
      finish(transfer,
             Error(error.kind(), context_->prefix() + ": " + transfer->describe() + ": " + error.message()));
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
    if (room == 0 || (!transfer->begun_ && room < sizeof(Frame))) return moved;
    if (!transfer->begun_) {
      write_frame(*outgoing.box, envelope);
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
  for (std::size_t budget = kMostPerPump; budget > 0;) {
    std::size_t available = incoming.box->available();
    if (!incoming.current) {
      // Where nothing is outstanding, no later message needs what this one holds up: it stays in the stream
      // until its receive is posted, which saves its bytes a detour through memory of their own.
      if (available < sizeof(Frame) || outstanding_.empty()) return moved;
      incoming.current = open_message(source, *incoming.box);
      available -= sizeof(Frame);
      budget -= std::min(budget, sizeof(Frame));
      moved = true;
    }
    const std::shared_ptr<Message> message = incoming.current;
    const std::uint64_t left = message->bytes - message->received;
    const auto stride = static_cast<std::size_t>(std::min<std::uint64_t>({left, available, kStride}));
    if (stride == 0 && left > 0) return moved;
    std::byte* target = message->receiver ? message->receiver->data_ : message->memory.get();
    if (target != nullptr) {
      incoming.box->read(target + message->received, stride);
    } else {
      incoming.box->skip(stride);
    }
    message->received += stride;
    budget -= std::min(budget, stride);
    if (message->received == message->bytes) {
      incoming.box->pad(padding_of(message->bytes));
      incoming.current.reset();
      if (message->receiver) complete(message);
    }
    incoming.box->publish();
    moved = true;
  }
  return moved;
}

std::shared_ptr<Messenger::Message> Messenger::open_message(int source, Inbox& box) {
  Frame frame;
  box.read(&frame, sizeof(frame));
  if (!is_dtype(frame.dtype)) {
    context_->fail_group(ErrorKind::aborted,
                         context_->name_of_rank(source) + " sent rank " + std::to_string(rank_) +
                             " a message of the unknown data type " + std::to_string(frame.dtype) +
                             "; install one version for all ranks",
                         {.rank = source});
    return std::make_shared<Message>(Message{source, frame.tag, DType::uint8, frame.bytes, 0, {}, {}});
  }
  auto message = std::make_shared<Message>(
      Message{source, frame.tag, static_cast<DType>(frame.dtype), frame.bytes, 0, {}, {}});
  const auto posted = std::find_if(posted_.begin(), posted_.end(), [&](const TransferPointer& transfer) {
    return wants(transfer->envelope(), *message);
  });
  if (posted != posted_.end()) {
    attach(message, *posted);
  } else if (buffer_unexpected(*message)) {
    unexpected_.push_back(message);
  }
  return message;
}

bool Messenger::wants(const Envelope& receive, const Message& message) noexcept {
  return (receive.peer == kAnyRank || receive.peer == message.source) && receive.tag == message.tag;
}

// For a message that no receive is posted for. Breaks the group where there is none.
bool Messenger::buffer_unexpected(Message& message) {
  try {
    message.memory = std::make_unique_for_overwrite<std::byte[]>(message.bytes);
    return true;
  } catch (const std::bad_alloc&) {
    context_->abort("rank " + std::to_string(rank_) + " has no memory for a message of " +
                    std::to_string(message.bytes) + " bytes from rank " + std::to_string(message.source) +
                    " for which no receive is posted yet");
    return false;
  }
}

void Messenger::attach(const std::shared_ptr<Message>& message, TransferPointer transfer) {
  posted_.remove(transfer);
  const Envelope& wanted = transfer->envelope();
  if (wanted.bytes != message->bytes || wanted.dtype != message->dtype) {
    // The message has no target now, so its bytes are dropped as they come.
    finish(transfer,
           Error(ErrorKind::mismatch,
                 context_->prefix() + ": " + transfer->describe() + " met a message of " +
                     std::to_string(message->bytes) + " bytes (" + name_of(message->dtype) + ") from rank " +
                     std::to_string(message->source) + "; the message is dropped and the group stays usable",
                 {.rank = message->source, .operation = "recv"}));
    return;
  }
  transfer->source_ = message->source;
  message->receiver = std::move(transfer);
}

void Messenger::complete(const std::shared_ptr<Message>& message) { finish(message->receiver, std::nullopt); }

void Messenger::finish(const TransferPointer& transfer, std::optional<Error> error) {
  // First, so that whoever finds the transfer finished finds it so in the record.
  if (error && error->kind() == ErrorKind::interrupted) {
    record_->messages.give_up(transfer->ticket_, now_ns(), error->message());
  } else if (error) {
    record_->messages.fail(transfer->ticket_, now_ns(), with_class(*error));
  } else {
    record_->messages.end(transfer->ticket_, now_ns());
  }
  transfer->finish(std::move(error));
  // Last, as the list may hold the last reference, and `transfer` may be its entry.
  const auto entry = std::find(outstanding_.begin(), outstanding_.end(), transfer);
  if (entry != outstanding_.end()) outstanding_.erase(entry);
  if (waiters_ > 0) changed_.notify_all();
}

// Waiting for messages: progress, the background thread, failures, and the end.

namespace {

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
  if (ended == 0 || now_ns() < ended + kExplanationLimit || context_->departed(rank)) return;
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
        } else if (spin_end != 0) {
          spin_policy_.failed();
          spin_end = 0;
          ++idle;  // no long spin again until something moves
        } else {
          offer_end = end;
        }
      }
      if (!moved && (idle < spins || (offer_end != 0 && now_ns() < offer_end))) {
        lock.unlock();
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
