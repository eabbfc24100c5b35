#include "engine/transfer.hpp"

#include <string>
#include <utility>

#include "engine/messenger.hpp"

namespace collectives {

BegunOperation record_of(bool sends, const Envelope& envelope, std::uint64_t number, Nanoseconds timeout,
                         Nanoseconds began) noexcept {
  return {.kind = sends ? kSend : kReceive,
          .dtype = envelope.dtype,
          .tensors = 1,
          .peer = envelope.peer,
          .tag = envelope.tag,
          .number = number,
          .count = envelope.bytes / size_of(envelope.dtype),
          .bytes = envelope.bytes,
          .timeout = timeout,
          .began = began};
}

Transfer::Transfer(std::shared_ptr<Messenger> messenger, Direction direction, const Envelope& envelope,
                   std::byte* data, Nanoseconds timeout, Owner owner)
    : Task(Opcode::none, std::move(owner)),
      messenger_(std::move(messenger)),
      direction_(direction),
      envelope_(envelope),
      data_(data),
      timeout_(timeout),
      deadline_(deadline_after(timeout, began_)) {}

void Transfer::poll() { messenger_->poll(*this); }

void Transfer::undo() { messenger_->undo(*this); }

void Transfer::abandon() {
  if (!finished()) messenger_->abandon(*this);
}

void Transfer::rest() { messenger_->rest(*this); }

bool Transfer::wait(Nanoseconds deadline, Interrupt* interrupt) {
  return finished() || messenger_->wait(*this, deadline, interrupt);
}

ErrorDetails Transfer::details() const {
  return {.rank = envelope_.peer, .operation = direction_ == Direction::send ? "send" : "recv"};
}

ErrorDetails Transfer::awaited(const RankContext& /*context*/) const {
  ErrorDetails about = details();
  if (about.rank >= 0) about.missing = {about.rank};
  return about;
}

std::string Transfer::describe() const {
  const bool sends = direction_ == Direction::send;
  std::string text = sends ? "send of " : "receive of ";
  text += std::to_string(envelope_.bytes) + " bytes (" + name_of(envelope_.dtype) + ")" +
          (sends ? " to " : " from ");
  text += envelope_.peer == kAnyRank ? "any rank" : "rank " + std::to_string(envelope_.peer);
  return text + ", tag " + std::to_string(envelope_.tag);
}

}  // namespace collectives
