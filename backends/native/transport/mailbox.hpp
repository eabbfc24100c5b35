// One direction of point-to-point bytes between two ranks: a stream through a ring in shared memory.
//
// Positions count bytes from the beginning of the stream; a position modulo the ring's size is where it lies.
// The sender publishes how far it has written, the receiver how far it has read, and each wakes the other
// where it sleeps.
//
// Thread safety: one thread at a time uses an end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/station.hpp"

namespace collectives {

class Outbox {
 public:
  Outbox(Station& station, int receiver) : station_(station), receiver_(receiver) {}

  // Bytes that can be written now. Allocates the ring when first asked; throws where there is no memory.
  std::size_t room();
  // Appends at most `room()` bytes; the receiver sees them after `publish`.
  void write(const void* bytes, std::size_t count);
  void skip(std::size_t count) { written_ += count; }
  void publish();

 private:
  Station& station_;
  int receiver_;
  std::uint64_t written_ = 0;
  bool committed_ = false;
};

class Inbox {
 public:
  Inbox(Station& station, int sender) : station_(station), sender_(sender) {}

  // Bytes that can be read now.
  std::size_t available() const noexcept;
  // Takes at most `available()` bytes; the sender may overwrite them after `publish`.
  void read(void* bytes, std::size_t count);
  void skip(std::size_t count) { read_ += count; }
  void publish();

 private:
  Station& station_;
  int sender_;
  std::uint64_t read_ = 0;
};

}  // namespace collectives
