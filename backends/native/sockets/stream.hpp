// A byte stream in both directions between two ranks on different machines, for long messages.
//
// A stream carries bytes without frames: both ends know from the operation what comes next, and queue memory
// to be sent and memory to be filled. Positions count bytes of one direction from the beginning of the
// stream. It has one socket or several, where one connection cannot fill the link: stripes of equal length
// go through the sockets round robin, each socket on its own, so that a slow one holds up only its share.
//
// Nothing here waits; see transport/stream_pool.hpp. Thread safety: one thread at a time uses a stream.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "sockets/connection.hpp"

namespace collectives {

class Stream {
 public:
  // Most sockets of a stream.
  static constexpr int kMostSockets = 32;

  // The sockets do not block, and the peer has theirs in the same order.
  Stream(int peer, std::vector<Connection> sockets);

  int peer() const noexcept { return peer_; }

  // Queues memory that must stay valid until `sent` or `received` has reached the position that is returned.
  std::uint64_t send(const std::byte* data, std::size_t bytes);
  std::uint64_t receive(std::byte* data, std::size_t bytes);

  // Positions up to which everything has been handed to the sockets, or has been received.
  std::uint64_t sent() const noexcept { return outgoing_.done; }
  std::uint64_t received() const noexcept { return incoming_.done; }

  bool busy() const noexcept {
    return outgoing_.done < outgoing_.queued || incoming_.done < incoming_.queued;
  }
  // Gives the sockets back.
  std::vector<Connection> release() { return std::move(sockets_); }

  // Moves bytes as far as that goes without waiting; returns whether any moved. Throws ErrorKind::network
  // where a connection has ended that is still needed, and ForgedError where others have changed what came
  // on it.
  bool pump();

  // Adds what `pump` waits for.
  void add_to(std::vector<pollfd>& waiting) const;
  // Whether `pump` has bytes to move of which the kernel tells nothing.
  bool holds() const noexcept;

 private:
  struct Piece {
    std::uint64_t begin;
    std::byte* data;
    std::size_t bytes;
  };
  // One direction.
  struct Flow {
    std::deque<Piece> pieces;         // adjacent; those that are done are gone
    std::vector<std::uint64_t> next;  // position of each socket's next byte
    std::uint64_t queued = 0;
    std::uint64_t done = 0;
  };

  std::uint64_t queue(Flow& flow, std::byte* data, std::size_t bytes);
  template <class Move>
  bool pump(Flow& flow, Move&& move);
  std::uint64_t stripe_end(std::uint64_t position) const noexcept;

  int peer_;
  std::vector<Connection> sockets_;
  Flow outgoing_;
  Flow incoming_;
};

}  // namespace collectives
