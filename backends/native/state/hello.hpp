// What a rank says first on a connection with another one of its group (security/handshake.hpp). The proof of
// both ends covers it. Which group is meant is in the key: each group has its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "security/handshake.hpp"
#include "state/segment_layout.hpp"

namespace collectives {

enum class Purpose : std::uint32_t {
  control = 0,  // between leaders; the control channel keeps it
  arrival = 1,  // arrivals between leaders (arrival_exchange.hpp)
  stream = 2,   // long messages
  mail = 3,     // point-to-point messages, from the rank that dials to the one that accepts
  memory = 4,   // shared memory, from a follower to the leader of its machine (bootstrap.hpp)
};

struct Hello {
  std::uint64_t magic = kMagic;
  std::uint64_t version = kLayoutVersion;
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t size = 0;
  Purpose purpose = Purpose::control;
  std::int32_t index = 0;
  std::uint32_t reserved = 0;

  std::string bytes() const { return {reinterpret_cast<const char*>(this), sizeof(*this)}; }
};
static_assert(sizeof(Hello) == 40);

// The handshake of whoever makes such a connection.
inline Handshake dialling(std::string key, const Hello& hello) {
  return Handshake::dial(std::move(key), hello.bytes());
}

// The handshake of whoever takes one.
inline Handshake accepting(std::string key) {
  return Handshake::accept(std::move(key),
                           Hello().bytes().substr(0, sizeof(Hello::magic) + sizeof(Hello::version)),
                           sizeof(Hello));
}

// The hello of a handshake that asks.
inline Hello hello_of(const Handshake& handshake) noexcept {
  Hello hello;
  std::memcpy(&hello, handshake.hello().data(), sizeof(hello));
  return hello;
}

}  // namespace collectives
