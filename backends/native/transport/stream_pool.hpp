// The streams of a rank to ranks on other machines, and one operation's use of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "common/clock.hpp"
#include "sockets/stream.hpp"
#include "state/rank_context.hpp"

namespace collectives {

class ConnectionManager;

// Connections for long messages, made when first needed and kept for the life of a group. Only the thread
// that executes collectives uses them.
class StreamPool {
 public:
  // Takes the number of sockets of each stream that this rank dials from COLLECTIVES_HOST_STREAMS, or, where
  // that is not set, chooses it for each. Throws std::invalid_argument where the variable is no such number.
  StreamPool(RankContext& context, ConnectionManager& connections);

  Stream& with(const Call& call, int rank);

  // Memory that operations use one after the other; what it held before is lost.
  std::byte* scratch(std::size_t bytes);

 private:
  int sockets_for(const Connection& first) const;

  RankContext& context_;
  ConnectionManager& connections_;
  const int sockets_;  // 0: chosen for each stream
  std::map<int, Stream> streams_;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
};

// One operation's use of streams.
class StreamSession {
 public:
  StreamSession(RankContext& context, const Call& call, StreamPool& streams)
      : context_(context), call_(call), streams_(streams) {}

  // Connects where that is the first time; both ranks must ask for it.
  Stream& with(int rank);

  // Moves bytes of all streams in use as far as that goes without waiting; returns whether any moved. Throws
  // ErrorKind::peer_lost where a peer has gone.
  bool pump();

  // Waits until a stream can move, for `most` at most. Throws where the group breaks, and on the deadline.
  // `peer`: a rank that is waited for, for messages.
  void wait(int peer, Nanoseconds most);

  // Receives through a stream that is not in use yet, and waits for it.
  void receive(Stream& stream, std::byte* data, std::size_t bytes);

  // Pumps and waits until everything queued has been sent and received.
  void finish();

 private:
  RankContext& context_;
  const Call& call_;
  StreamPool& streams_;
  std::vector<Stream*> active_;
  std::vector<pollfd> waiting_;
  Nanoseconds next_check_ = 0;
};

}  // namespace collectives
