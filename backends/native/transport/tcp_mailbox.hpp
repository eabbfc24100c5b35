// Point-to-point bytes through a connection with another machine.
//
// A connection carries bytes one way: whoever sends dials. Then neither end holds unread bytes when it
// closes, which would destroy what is still in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sockets/connection.hpp"
#include "transport/mailbox.hpp"

namespace collectives {

class ConnectionManager;

class TcpOutbox final : public Outbox {
 public:
  TcpOutbox(ConnectionManager& connections, int sender, int receiver);
  ~TcpOutbox() override;

  std::size_t room() override;
  void write(const void* bytes, std::size_t count) override;
  void pad(std::size_t) override {}
  void publish() override { flush(); }
  bool flushed() override;
  void before_sleep() override;
  Nanoseconds ended() const noexcept override { return ended_; }
  std::string error_text() const override;

 private:
  void connect();
  void flush();
  std::size_t push(const std::byte* bytes, std::size_t count);
  void end(const std::string& error_text);

  ConnectionManager& connections_;
  const int receiver_;
  const int index_;
  Connection connection_;
  bool dialled_ = false;
  bool watched_ = false;
  std::uint64_t seen_changes_ = 0;
  std::vector<std::byte> rest_;  // what the connection did not take at once
  std::size_t begin_ = 0;        // of what is left of it
  Nanoseconds ended_ = 0;
  std::string error_text_;
};

class TcpInbox final : public Inbox {
 public:
  TcpInbox(ConnectionManager& connections, int sender, int receiver);
  ~TcpInbox() override;

  std::size_t available() override;
  void peek(void* bytes, std::size_t count) const override;
  void read(void* bytes, std::size_t count) override;
  void skip(std::size_t count) override { begin_ += count; }
  void pad(std::size_t) override {}
  void publish() override {}
  void before_sleep() override;
  Nanoseconds ended() const noexcept override { return ended_; }
  std::string error_text() const override { return error_text_; }

 private:
  ConnectionManager& connections_;
  const int sender_;
  const int index_;
  Connection connection_;
  bool watched_ = false;  // ever
  bool armed_ = false;    // since the last bytes came
  std::uint64_t seen_changes_ = 0;
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  Nanoseconds ended_ = 0;
  std::string error_text_;
};

}  // namespace collectives
