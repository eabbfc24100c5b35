#include "store_client/connection.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "common/error.hpp"
#include "security/handshake.hpp"
#include "store/protocol.hpp"

namespace collectives::store_client {
namespace {

// How long a thread sleeps before it looks for signals. One that comes while it sleeps wakes it; this is for
// one that came just before, or to another thread.
constexpr Nanoseconds kLongestSleep = kSecond;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Replies& Connection::await(std::string_view form, Nanoseconds deadline, Interrupt& interrupt) {
  replies_.expect(form);
  while (!replies_.complete()) read_into(replies_, deadline, interrupt);
  return replies_;
}

Replies& Connection::receive(std::size_t bytes, Nanoseconds deadline, Interrupt& interrupt) {
  while (replies_.held().size() < bytes) read_into(replies_, deadline, interrupt);
  return replies_;
}

SocketConnection::SocketConnection(int socket) noexcept : socket_(socket), channel_(socket) {
  const timeval limit{kLongestSleep / kSecond, 0};
  receive_ends_ = ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0;
}

SocketConnection::Proved SocketConnection::prove(std::string key, bool encrypts, Nanoseconds deadline,
                                                 Interrupt& interrupt) {
  Handshake handshake =
      Handshake::dial(std::move(key), store::kHello, encrypts ? preferred_suite() : CipherSuite::none);
  Handshake::Status status = handshake.step(socket_);
  while (status == Handshake::Status::goes_on) {
    sleep(POLLIN, deadline, interrupt);
    status = handshake.step(socket_);
  }
  if (status == Handshake::Status::proved) {
    channel_ = handshake.channel(socket_, store::kRecordsAtOnce);
    return Proved::both;
  }
  if (status == Handshake::Status::differs) return Proved::differ;
  if (handshake.nonce().starts_with(store::kTurnedAway)) return Proved::turned_away;
  if (!handshake.ended()) return Proved::not_server;
  if (handshake.error() == 0) return Proved::ended;
  throw std::system_error(handshake.error(), std::generic_category(), "handshake");
}

void SocketConnection::send(std::string_view requests, Nanoseconds deadline, Interrupt& interrupt) {
  while (!requests.empty()) {
    const ssize_t sent = channel_.send(requests.data(), requests.size());
    if (sent >= 0) {
      requests.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      sleep(POLLOUT, deadline, interrupt);
    } else if (errno != EINTR) {
      fail("send");
    }
  }
}

void SocketConnection::read_into(Replies& replies, Nanoseconds deadline, Interrupt& interrupt) {
  const std::span<char> room = replies.room();
  interrupt.blocks();
  // An answer takes the server longer than a look takes here, so the thread sleeps at once: in the call
  // itself, where it ends after kLongestSleep and that is not too late.
  bool looks = !receive_ends_ || (deadline != kNever && deadline - now_ns() <= kLongestSleep);
  for (;;) {
    if (looks && !channel_.holds()) sleep(POLLIN, deadline, interrupt);
    const ssize_t size = channel_.receive(room.data(), room.size(), looks ? MSG_DONTWAIT : 0);
    if (size > 0) return replies.arrived(static_cast<std::size_t>(size));
    if (size == 0) throw Error(ErrorKind::network, "the server closed the connection");
    if (errno == kForged) throw ForgedError();
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) fail("recv");
    if (interrupt.requested()) throw Error(ErrorKind::interrupted, "interrupted");
    looks = true;
  }
}

void SocketConnection::sleep(short events, Nanoseconds deadline, Interrupt& interrupt) const {
  interrupt.blocks();
  pollfd waiting{socket_, events, 0};
  for (;;) {
    const Nanoseconds left = deadline == kNever ? kNever : deadline - now_ns();
    if (left <= 0) throw Error(ErrorKind::timeout, "timed out");
    const Nanoseconds slice = std::min(left, kLongestSleep);
    const timespec limit{slice / kSecond, slice % kSecond};
    const int ready = ::ppoll(&waiting, 1, &limit, nullptr);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail("poll");
    if (interrupt.requested()) throw Error(ErrorKind::interrupted, "interrupted");
  }
}

}  // namespace collectives::store_client
