// How the leaders of machines meet: each has a frame with what its local ranks published, and gets those of
// all others.
//
//   frame   Head, then for each rank of its machine, ascending: Line, its splits (all_to_all only), the bytes
//           that it staged
// What is staged goes only to machines that need it: to the root's, where only the root reads.
//
// Up to kMostDirect machines each sends its frame to every other. Beyond that, messages cost more than the
// time on the way, so frames are passed on (the all-gather of Bruck et al., "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", 1997): the machines form a circle, and in
// the round of distance d = 1, 2, 4, ... each gives the machine d before it the frames that it holds, its own
// and those of the machines behind it, and takes as many from the machine d behind it. So all have all after
// as many rounds as the number of machines has bits. Whatever the operation, the way is the same, because
// leaders that disagree about the operation must still hear each other.
//
// A frame has the length that its head says, so that such leaders still understand each other. Frames of one
// connection follow each other in order; those of the next operation may come while this one's are awaited
// from others, and are kept.
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
  static constexpr int kMostDirect = 32;

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
  using Frame = std::vector<std::byte>;
  struct Peer {
    int machine = 0;
    int leader = 0;
    // Frames of each operation that go there, this machine's and those of the machines behind it, and that
    // come from there, the peer's and those of the machines behind that.
    int gives = 0;
    int takes = 0;
    // Frames that go there reach the machines whose distances from a frame's own are alike in these bits.
    unsigned mask = 0;
    Descriptor socket;
    Frame in;  // the first `come` bytes; of them, `used` have been understood
    std::size_t come = 0;
    std::size_t used = 0;
    int heard = 0;               // frames of this operation that are in the mirrors
    const Frame* out = nullptr;  // what goes there in this operation, once it is all here
    Frame passed_on;             // memory for that
    std::size_t sent = 0;
  };

  // Decide, once, who gives frames to whom.
  void plan_direct_ways();
  void plan_passing_on();
  Peer& peer_of(int machine);
  // The machine so many behind another on the circle, and the other way round.
  int behind(int machine, int distance) const noexcept { return (machine + distance) % machines_; }
  int distance(int from, int to) const noexcept { return (to - from + machines_) % machines_; }

  void compose(const Call& call, bool with_staged, Frame& frame) const;
  bool needs_staged(const Peer& peer, int origin, const Fingerprint& what) const;
  const Frame& outgoing(Peer& peer, const Call& call);
  static void append_lines(Frame& message, const Frame& frame, std::size_t ranks);
  void connect(const Call& call);
  // These return whether something moved.
  bool send(Peer& peer, const Call& call);
  bool receive(Peer& peer, const Call& call);
  bool use(Peer& peer, const Call& call);
  bool owes(const Peer& peer) const noexcept;
  bool done() const;
  void wait(const Call& call);

  Station& station_;
  const int machines_;
  std::vector<Peer> peers_;  // ascending by distance where frames are passed on
  Frame whole_;              // this machine's, with what is staged
  Frame lines_;              // and without
  std::vector<Frame> held_;  // those that are passed on, by distance from this machine; the first is not used
  int holds_ = 1;            // of them, from the first on without a gap
  bool connected_ = false;
  Spinning spinning_;
};

}  // namespace collectives
