// One client's connection to a store's server: requests go out as they are given, replies are awaited.
//
// Errors: ErrorKind::timeout at the deadline, ErrorKind::network where the server has ended the connection or
// broken the protocol, ErrorKind::interrupted where the hook asks for it, std::system_error for what the
// kernel says. After a timeout of `receive` or `await` the connection may go on: the replies are still due.
//
// Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/clock.hpp"
#include "security/channel.hpp"
#include "state/call.hpp"
#include "store_client/replies.hpp"

namespace collectives::store_client {

class Connection {
 public:
  Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  virtual ~Connection() = default;

  virtual void send(std::string_view requests, Nanoseconds deadline, Interrupt& interrupt) = 0;

  // Returns when all replies of the form (replies.hpp) have come; they are to be taken.
  Replies& await(std::string_view form, Nanoseconds deadline, Interrupt& interrupt);

  // Returns the next bytes, which are to be taken.
  Replies& receive(std::size_t bytes, Nanoseconds deadline, Interrupt& interrupt);

 protected:
  // Adds to the replies what has come, at least a byte.
  virtual void read_into(Replies& replies, Nanoseconds deadline, Interrupt& interrupt) = 0;

 private:
  Replies replies_;
};

// Over a socket that is connected; it stays the caller's, who keeps it open as long as this uses it.
class SocketConnection final : public Connection {
 public:
  // Where the socket blocks, an answer takes one call of the kernel less.
  explicit SocketConnection(int socket) noexcept;

  enum class Proved : std::uint8_t {
    both,         // ends, to each other
    turned_away,  // the server has no room
    differ,       // one end encrypts, the other does not
    ended,        // the server closed the connection
    not_server,   // it does not know the key: its proof was wrong
  };

  // The handshake (security/handshake.hpp), before anything is sent. With `encrypts`, what follows is.
  Proved prove(std::string key, bool encrypts, Nanoseconds deadline, Interrupt& interrupt);

  void send(std::string_view requests, Nanoseconds deadline, Interrupt& interrupt) override;

 protected:
  void read_into(Replies& replies, Nanoseconds deadline, Interrupt& interrupt) override;

 private:
  void sleep(short events, Nanoseconds deadline, Interrupt& interrupt) const;

  int socket_;
  Channel channel_;
  bool receive_ends_;  // whether the kernel ends a receive that blocks
};

}  // namespace collectives::store_client
