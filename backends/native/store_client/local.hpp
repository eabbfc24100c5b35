// A client in the server's own process, without a socket: its thread carries the requests out itself. Not for
// requests that wait.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "store/loop.hpp"
#include "store_client/connection.hpp"

namespace collectives::store_client {

class LocalConnection final : public Connection {
 public:
  // Without a server it is a connection that has ended.
  explicit LocalConnection(std::weak_ptr<store::Loop> server);
  LocalConnection(const LocalConnection&) = delete;
  LocalConnection& operator=(const LocalConnection&) = delete;
  ~LocalConnection() override;

  void send(std::string_view requests, Nanoseconds deadline, Interrupt& interrupt) override;

 protected:
  void read_into(Replies& replies, Nanoseconds deadline, Interrupt& interrupt) override;

 private:
  std::weak_ptr<store::Loop> server_;  // ends when its owner says so
  store::ClientId client_ = 0;
  std::string output_;  // of the server
  std::size_t read_ = 0;
};

}  // namespace collectives::store_client
