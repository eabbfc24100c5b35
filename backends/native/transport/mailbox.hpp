// One direction of point-to-point bytes between two ranks: through a ring in shared memory (shm_mailbox.hpp),
// or, between machines, through a connection (tcp_mailbox.hpp).
//
// Thread safety: one thread at a time uses an end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/clock.hpp"

namespace collectives {

class Outbox {
 public:
  Outbox() = default;
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  virtual ~Outbox() = default;

  // Bytes that can be written now. Allocates, or begins to connect, when first asked; throws where there is
  // no memory.
  virtual std::size_t room() = 0;
  // Whether `count` bytes can be written now; may underestimate, where `room` does not. Throws as that does.
  virtual bool has_room(std::size_t count) { return room() >= count; }
  // Appends at most `room()` bytes; the receiver sees them after `publish`.
  virtual void write(const void* bytes, std::size_t count) = 0;
  // Space between messages.
  virtual void pad(std::size_t count) = 0;
  virtual void publish() = 0;
  // Whether all that was written has left this process.
  virtual bool flushed() { return true; }
  // This rank's mail doorbell is to ring when something changes.
  virtual void before_sleep() {}
  // Since when the connection is of no use, 0 where it is, and why.
  virtual Nanoseconds ended() const noexcept { return 0; }
  virtual std::string error_text() const { return {}; }
};

class Inbox {
 public:
  Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  virtual ~Inbox() = default;

  // Bytes that can be read now.
  virtual std::size_t available() = 0;
  // Copies the next of them without taking them, at most `available()`.
  virtual void peek(void* bytes, std::size_t count) const = 0;
  // Takes at most `available()` bytes; the sender may overwrite them after `publish`.
  virtual void read(void* bytes, std::size_t count) = 0;
  // Drops at most `available()` bytes.
  virtual void skip(std::size_t count) = 0;
  virtual void pad(std::size_t count) = 0;
  virtual void publish() = 0;
  // As for an outbox.
  virtual void before_sleep() {}
  virtual Nanoseconds ended() const noexcept { return 0; }
  virtual std::string error_text() const { return {}; }
};

}  // namespace collectives
