#include "engine/messenger.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/kernels.hpp"
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

}  // namespace collectives
