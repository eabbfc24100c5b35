// A connection with another machine: its socket, and how bytes travel on it.
#pragma once

#include <utility>

#include "memory/descriptor.hpp"
#include "security/channel.hpp"

namespace collectives {

struct Connection {
  Connection() = default;
  // In clear.
  explicit Connection(Descriptor given) : socket(std::move(given)), channel(socket.get()) {}
  Connection(Descriptor given, Channel how) : socket(std::move(given)), channel(std::move(how)) {}

  explicit operator bool() const noexcept { return static_cast<bool>(socket); }

  Descriptor socket;
  Channel channel;
};

}  // namespace collectives
