// A send or a receive in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/clock.hpp"
#include "common/codes.hpp"
#include "engine/operation_record.hpp"
#include "engine/task.hpp"

namespace collectives {

class Messenger;

inline constexpr int kAnyRank = -1;

struct Envelope {
  int peer = kAnyRank;  // receiver of a send; sender of a receive, or kAnyRank
  std::uint32_t tag = 0;
  DType dtype = DType::uint8;
  std::uint64_t bytes = 0;
};

// What the flight record says of a message.
BegunOperation record_of(bool sends, const Envelope& envelope, std::uint64_t number, Nanoseconds timeout,
                         Nanoseconds began) noexcept;

class Transfer final : public Task, public std::enable_shared_from_this<Transfer> {
 public:
  enum class Direction { send, receive };

  Transfer(std::shared_ptr<Messenger> messenger, Direction direction, const Envelope& envelope,
           std::byte* data, Nanoseconds timeout, Owner owner);

  int source() const noexcept override { return finished() ? source_ : -1; }
  bool observe() noexcept override { return mark_observed(); }
  void poll() override;
  void undo() override;
  void abandon() override;
  void rest() override;
  bool wait(Nanoseconds deadline, Interrupt* interrupt) override;

  Direction direction() const noexcept { return direction_; }
  const Envelope& envelope() const noexcept { return envelope_; }
  Nanoseconds timeout() const noexcept { return timeout_; }
  Nanoseconds deadline() const noexcept { return deadline_; }
  Nanoseconds began() const noexcept { return began_; }

  // "send of 40 bytes (float32) to rank 1, tag 0".
  std::string describe() const override;
  ErrorDetails awaited(const RankContext& context) const override;
  // The same for programs.
  ErrorDetails details() const;

 private:
  friend class Messenger;  // which guards all of this by its mutex

  std::shared_ptr<Messenger> messenger_;
  const Direction direction_;
  const Envelope envelope_;
  std::byte* data_;
  const Nanoseconds timeout_;
  const Nanoseconds began_ = now_ns();
  const Nanoseconds deadline_;
  std::unique_ptr<std::byte[]> rest_;  // what is to leave yet, of a sender that has gone
  std::uint64_t moved_ = 0;            // bytes that have left or come
  bool begun_ = false;                 // its frame has left
  bool suspended_ = false;             // until somebody asks for it
  int waiters_ = 0;
  int source_ = -1;
  RecordTicket ticket_;  // in the flight record
};

}  // namespace collectives
