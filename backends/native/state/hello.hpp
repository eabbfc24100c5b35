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
  stream = 2,   // see stream_pool.hpp
  mail = 3,     // point-to-point, from the rank that dials to the one that accepts
  memory = 4,   // from a follower to the leader of its machine (bootstrap.hpp)
};

// What such a connection carries, in words.
constexpr const char* name_of(Purpose purpose) noexcept {
  switch (purpose) {
    case Purpose::control:
      return "failures and statuses";
    case Purpose::arrival:
      return "short collectives";
    case Purpose::stream:
      return "long messages";
    case Purpose::mail:
      return "messages";
    case Purpose::memory:
      return "shared memory";
  }
  return "unknown purposes";
}

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
inline Handshake dialling(std::string key, const Hello& hello, CipherSuite suite = CipherSuite::none) {
  return Handshake::dial(std::move(key), hello.bytes(), suite);
}

// The handshake of whoever takes one; all of a group either encrypt or do not.
inline Handshake accepting(std::string key, bool encrypts = false) {
  return Handshake::accept(std::move(key),
                           Hello().bytes().substr(0, sizeof(Hello::magic) + sizeof(Hello::version)),
                           sizeof(Hello), {.clear = !encrypts, .encrypted = encrypts});
}

// The hello of a handshake that asks.
inline Hello hello_of(const Handshake& handshake) noexcept {
  Hello hello;
  std::memcpy(&hello, handshake.hello().data(), sizeof(hello));
  return hello;
}

}  // namespace collectives
