// Messages between the ranks of a communicator, over unix sockets.
//
// A message is taken by a receive of the same lane, kind and length, in the order in which its sender sent
// those of the lane. It is delivered when the receiver has taken it, not before: an operation waits for its
// peers, as NCCL's large ones do.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace nccl_double {

// Collectives and point-to-point messages do not meet, nor do the connections that each makes, nor the
// beginning and the end of the communicator.
enum class Lane : std::uint32_t {
  collective,
  point_to_point,
  connecting_collectives,
  connecting_messages,
  beginning,
  ending,
  lanes
};

struct Outgoing {
  int peer;
  const std::byte* data;
  std::size_t bytes;
};

struct Incoming {
  int peer;
  std::byte* data;
  std::size_t bytes;
};

enum Status : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

// What went wrong between ranks; NCCL would report it as an asynchronous error.
struct Failure {
  int status;
  std::string text;
};

class Mesh {
 public:
  // Blocks until all ranks that give the same name have come.
  Mesh(const std::string& name, int rank, int size);
  ~Mesh() { leave(); }
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Sends and receives all at once; `kind` is the operation and must be the same at both ends. Returns false
  // when `stop` was set before all was done, and throws Failure. One thread at a time.
  bool exchange(Lane lane, int kind, const std::vector<Outgoing>& sends,
                const std::vector<Incoming>& receives, const std::atomic<bool>& stop);

  // Waits until all peers have called this, too, or have left.
  void part(int kind, const std::atomic<bool>& stop);

  // Closes the connections; what peers still wait for from this rank fails there.
  void leave();

 private:
  struct Header {
    std::uint32_t lane;
    std::int32_t kind;  // 0 for the note that a message was taken
    std::uint64_t bytes;
  };
  struct Message {
    Header header;
    std::vector<std::byte> data;
  };
  // What is still to be written; `owned` has the bytes where nobody else keeps them.
  struct Piece {
    std::vector<std::byte> owned;
    const std::byte* data;
    std::size_t bytes;
  };
  struct Counts {
    std::uint64_t sent = 0;
    std::uint64_t taken = 0;
    std::deque<Message> inbox;
  };
  struct Peer {
    int socket = -1;
    bool gone = false;
    std::deque<Piece> outbox;
    std::vector<std::byte> arrived;  // the beginning of a message or of its header
    Counts lanes[static_cast<int>(Lane::lanes)];
  };

  void post(int peer, const Header& header, const std::byte* data);
  bool take(Lane lane, int kind, const Incoming& receive);
  void pump();
  void write_to(Peer& peer);
  void read_from(Peer& peer);

  int rank_;
  std::vector<Peer> peers_;
};

}  // namespace nccl_double
