// The streams of a rank, and one operation's use of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "common/clock.hpp"
#include "transport/station.hpp"
#include "transport/stream.hpp"

namespace collectives {

// Connections for long messages, made when first needed and kept for the life of a group. Only the thread
// that executes collectives uses them.
class Streams {
 public:
  // Connects with a rank that asks for the same connection; blocks as an operation does.
  using Link = std::function<Descriptor(const Call& call, int rank, int index)>;

  // `sockets`: of each stream that this rank dials; 0 lets it choose.
  Streams(Station& station, Link link, int sockets);
  // The streams of a group between machines, by its courier and COLLECTIVES_HOST_STREAMS; null on one
  // machine. Throws std::invalid_argument where that variable is no number of sockets.
  static std::unique_ptr<Streams> of(Station& station);

  Stream& with(const Call& call, int rank);

  // Memory that operations use one after the other; what it held before is lost.
  std::byte* scratch(std::size_t bytes);

 private:
  int sockets_for(const Descriptor& first) const;

  Station& station_;
  Link link_;
  int sockets_;
  std::map<int, Stream> streams_;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
};

// One operation's traffic.
class Traffic {
 public:
  Traffic(Station& station, const Call& call, Streams& streams)
      : station_(station), call_(call), streams_(streams) {}

  // Connects where that is the first time; both ranks must ask for it.
  Stream& with(int rank);

  // Moves bytes of all streams in use as far as that goes without waiting; returns whether any moved. Throws
  // ErrorKind::peer_lost where a peer has gone.
  bool pump();

  // Waits until a stream can move, for `most` at most. Throws where the group breaks, and on the deadline.
  // `peer`: a rank that is waited for, for messages.
  void wait(int peer, Nanoseconds most);

  // Receives through a stream that is not in use yet.
  void hear(Stream& stream, std::byte* data, std::size_t bytes);

  // Pumps and waits until everything queued has been sent and has come.
  void finish();

 private:
  Station& station_;
  const Call& call_;
  Streams& streams_;
  std::vector<Stream*> active_;
  std::vector<pollfd> waiting_;
  Nanoseconds next_look_ = 0;
};

}  // namespace collectives
