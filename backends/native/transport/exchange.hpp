// How the leaders of machines meet: each sends one frame to every other, with what its local ranks published.
//
//   frame   Head, then for each rank of the sender's machine, ascending: Line, its splits (all_to_all only),
//   the
//           bytes that it staged
// What is staged goes only to machines that need it: to the root's, where only the root reads.
//
// A frame has the length that its head says, so leaders that disagree about the operation still understand
// each other. Frames of one connection follow each other in order; the next one may come while this one is
// awaited from others, and is kept.
//
// For the thread that executes collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/descriptor.hpp"
#include "transport/control_page.hpp"
#include "transport/spinning.hpp"

namespace collectives {

class Station;
struct Call;

class Exchange {
 public:
  explicit Exchange(Station& station);

  // Returns when the arrivals of all other machines at this operation are in the mirrors. All local ranks
  // have arrived.
  void run(const Call& call);

 private:
  struct Head {
    std::uint64_t sequence;
    std::uint64_t bytes;  // of the whole frame
  };
  struct Line {
    Fingerprint what;
    std::uint64_t own_count;
    std::uint32_t staged;  // bytes of it that follow
    std::uint32_t splits;  // numbers that follow
  };
  struct Peer {
    int machine = 0;
    int leader = 0;
    Descriptor socket;
    std::vector<std::byte> in;  // come and not used yet: the first `come` bytes
    std::size_t come = 0;
    std::size_t sent = 0;
    bool heard = false;  // its frame of this operation is in the mirrors
  };

  const std::vector<std::byte>& frame_for(const Peer& peer, const Call& call) const;
  void compose(const Call& call, bool with_staged, std::vector<std::byte>& frame) const;
  void connect(const Call& call);
  // These return whether something moved.
  bool send(Peer& peer, const Call& call);
  bool receive(Peer& peer, const Call& call);
  bool use(Peer& peer, const Call& call);
  bool done() const;
  void wait(const Call& call);

  Station& station_;
  std::vector<Peer> peers_;
  std::vector<std::byte> whole_;  // frame with what is staged
  std::vector<std::byte> lines_;  // frame without
  bool connected_ = false;
  Spinning spinning_;
};

}  // namespace collectives
