// One direction of point-to-point bytes between two ranks: through a ring in shared memory, or, between
// machines, through a connection.
//
// Positions count bytes from the beginning of the stream; a position modulo the ring's size is where it lies.
// The sender publishes how far it has written, the receiver how far it has read, and each wakes the other
// where it sleeps.
//
// A connection carries bytes one way: whoever sends dials. Then neither end holds unread bytes when it
// closes, which would destroy what is still on its way.
//
// Thread safety: one thread at a time uses an end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.hpp"
#include "memory/descriptor.hpp"
#include "transport/station.hpp"

namespace collectives {

class Courier;

class Outbox {
 public:
  Outbox() = default;
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  virtual ~Outbox() = default;

  // Bytes that can be written now. Allocates, or begins to connect, when first asked; throws where there is
  // no memory.
  virtual std::size_t room() = 0;
  // Whether `count` bytes can be written now; may look less closely than `room`. Throws as that does.
  virtual bool has_room(std::size_t count) { return room() >= count; }
  // Appends at most `room()` bytes; the receiver sees them after `publish`.
  virtual void write(const void* bytes, std::size_t count) = 0;
  // Space between messages.
  virtual void pad(std::size_t count) = 0;
  virtual void publish() = 0;
  // Whether all that was written has left this process.
  virtual bool flushed() { return true; }
  // This rank's mail bell is to ring when something changes.
  virtual void before_sleep() {}
  // Since when the connection is of no use, 0 where it is, and why.
  virtual Nanoseconds ended() const noexcept { return 0; }
  virtual std::string trouble() const { return {}; }
};

class Inbox {
 public:
  Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  virtual ~Inbox() = default;

  // Bytes that can be read now.
  virtual std::size_t available() = 0;
  // Looks at the next of them, at most `available()`.
  virtual void peek(void* bytes, std::size_t count) const = 0;
  // Takes at most `available()` bytes; the sender may overwrite them after `publish`.
  virtual void read(void* bytes, std::size_t count) = 0;
  // Drops at most `available()` bytes.
  virtual void skip(std::size_t count) = 0;
  virtual void pad(std::size_t count) = 0;
  virtual void publish() = 0;
  // As of an outbox.
  virtual void before_sleep() {}
  virtual Nanoseconds ended() const noexcept { return 0; }
  virtual std::string trouble() const { return {}; }
};

// To and from a rank, whichever machine it is on.
std::unique_ptr<Outbox> outbox_to(Station& station, int receiver);
std::unique_ptr<Inbox> inbox_from(Station& station, int sender);

class RingOutbox final : public Outbox {
 public:
  RingOutbox(Station& station, int receiver) : station_(station), receiver_(receiver) {}

  std::size_t room() override;
  // What was free at the last look is free still: looking again would fetch the receiver's line.
  bool has_room(std::size_t count) override;
  void write(const void* bytes, std::size_t count) override;
  void pad(std::size_t count) override { written_ += count; }
  void publish() override;

 private:
  Station& station_;
  int receiver_;
  std::uint64_t written_ = 0;
  std::uint64_t read_ = 0;  // what the receiver was last seen to have read
  bool committed_ = false;
};

class RingInbox final : public Inbox {
 public:
  RingInbox(Station& station, int sender) : station_(station), sender_(sender) {}

  std::size_t available() override;
  void peek(void* bytes, std::size_t count) const override;
  void read(void* bytes, std::size_t count) override;
  void skip(std::size_t count) override { read_ += count; }
  void pad(std::size_t count) override { read_ += count; }
  void publish() override;

 private:
  Station& station_;
  int sender_;
  std::uint64_t read_ = 0;
};

class RemoteOutbox final : public Outbox {
 public:
  RemoteOutbox(Courier& courier, int sender, int receiver);
  ~RemoteOutbox() override;

  std::size_t room() override;
  void write(const void* bytes, std::size_t count) override;
  void pad(std::size_t) override {}
  void publish() override { flush(); }
  bool flushed() override;
  void before_sleep() override;
  Nanoseconds ended() const noexcept override { return ended_; }
  std::string trouble() const override { return trouble_; }

 private:
  void connect();
  void flush();
  std::size_t push(const std::byte* bytes, std::size_t count);
  void end(const std::string& trouble);

  Courier& courier_;
  const int receiver_;
  const int index_;
  Descriptor socket_;
  bool dialled_ = false;
  bool watched_ = false;
  std::uint64_t arrivals_ = 0;
  std::vector<std::byte> rest_;  // what the connection did not take at once
  std::size_t begin_ = 0;        // of what is left of it
  Nanoseconds ended_ = 0;
  std::string trouble_;
};

class RemoteInbox final : public Inbox {
 public:
  RemoteInbox(Courier& courier, int sender, int receiver);
  ~RemoteInbox() override;

  std::size_t available() override;
  void peek(void* bytes, std::size_t count) const override;
  void read(void* bytes, std::size_t count) override;
  void skip(std::size_t count) override { begin_ += count; }
  void pad(std::size_t) override {}
  void publish() override {}
  void before_sleep() override;
  Nanoseconds ended() const noexcept override { return ended_; }
  std::string trouble() const override { return trouble_; }

 private:
  Courier& courier_;
  const int sender_;
  const int index_;
  Descriptor socket_;
  bool watched_ = false;  // ever
  bool armed_ = false;    // since the last bytes came
  std::uint64_t arrivals_ = 0;
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  Nanoseconds ended_ = 0;
  std::string trouble_;
};

}  // namespace collectives
