// Point-to-point bytes through a ring in shared memory.
//
// Positions count bytes from the beginning of the ring and never wrap; a position modulo the ring's size is
// where it lies. The sender publishes how far it has written, the receiver how far it has read, and each
// wakes the other where it sleeps. A position that cannot be, given this end's own, breaks the group; the
// ring seems full then, or empty.
#pragma once

#include <cstddef>
#include <cstdint>

#include "state/rank_context.hpp"
#include "transport/mailbox.hpp"

namespace collectives {

class ShmOutbox final : public Outbox {
 public:
  ShmOutbox(RankContext& context, int receiver) : context_(context), receiver_(receiver) {}

  std::size_t room() override;
  // What was free at the last look is free still: looking again would fetch the receiver's line.
  bool has_room(std::size_t count) override;
  void write(const void* bytes, std::size_t count) override;
  void pad(std::size_t count) override { written_ += count; }
  void publish() override;

 private:
  std::size_t unused() const noexcept {
    return context_.shape().mail_bytes - static_cast<std::size_t>(written_ - read_);
  }

  RankContext& context_;
  int receiver_;
  std::uint64_t written_ = 0;
  std::uint64_t read_ = 0;  // what the receiver was last seen to have read: at most a ring less
  bool committed_ = false;
};

class ShmInbox final : public Inbox {
 public:
  ShmInbox(RankContext& context, int sender) : context_(context), sender_(sender) {}

  std::size_t available() override;
  void peek(void* bytes, std::size_t count) const override;
  void read(void* bytes, std::size_t count) override;
  void skip(std::size_t count) override { read_ += count; }
  void pad(std::size_t count) override { read_ += count; }
  void publish() override;

 private:
  RankContext& context_;
  int sender_;
  std::uint64_t read_ = 0;
};

}  // namespace collectives
