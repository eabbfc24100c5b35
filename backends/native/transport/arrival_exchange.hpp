// How ranks on several machines arrive at a collective: the leader of each machine has a frame with what its
// local ranks published, and gets the frames of all other machines.
//
//   frame   Head, then for each rank of its machine, ascending: ArrivalRecord, its splits (of all_to_all),
//           what it staged; then what the machine contributes as one
// Staged bytes go only to machines that need them: to the root's, where only the root reads. Where machines
// contribute as one (state/machine_contribution.hpp), what ranks staged stays on their machine. Results of
// ranks go to all in a second exchange: frames of a Head and, for each rank of the machine, its result.
//
// Up to kMostDirect machines each sends its frame to every other. Beyond that, messages cost more than the
// time on the wire, so frames are forwarded (the all-gather of Bruck et al., "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", 1997): the machines form a circle, and in
// the round of distance d = 1, 2, 4, ... each gives the machine d before it the frames that it holds, its own
// and those of the machines behind it, and takes as many from the machine d behind it. So all have all after
// as many rounds as the number of machines has bits. The pattern does not depend on the operation, because
// leaders that disagree about the operation must still exchange frames.
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

#include "sockets/connection.hpp"
#include "state/control_page.hpp"
#include "state/spin_policy.hpp"

namespace collectives {

class ConnectionManager;
class MachineContribution;
class RankContext;
struct Call;

class ArrivalExchange {
 public:
  static constexpr int kMostDirect = 32;

  ArrivalExchange(RankContext& context, ConnectionManager& connections);

  // To be called after this rank has published its arrival: returns when the arrivals of all ranks and what
  // they staged can be read. On a leader that exchanges frames; the others wait for their leader.
  //
  // With a contribution, which needs `takes_contributions`, the staging slot of another machine's leader
  // holds what that machine sent to this one, and those of its other ranks hold nothing.
  void arrive(const Call& call, MachineContribution* contribution);

  // Whether leaders send to each other directly, so that each can send something else to each.
  bool takes_contributions() const noexcept { return machines_ <= kMostDirect; }
  // On a leader, once the staging slots of all local ranks hold results of these lengths, by rank: returns
  // when those of all other ranks do, too. Leaders that exchange results agree about the lengths.
  void exchange_results(const Call& call, const std::vector<std::size_t>& lengths);

 private:
  struct Head {
    std::uint64_t sequence;
    std::uint64_t bytes;  // of the whole frame
  };
  struct ArrivalRecord {
    Fingerprint what;
    std::uint64_t own_count;
    std::uint32_t staged;  // bytes of it that follow
    std::uint32_t splits;  // numbers that follow
  };
  using Frame = std::vector<std::byte>;
  struct Peer {
    int machine = 0;
    int leader = 0;
    // Of each operation: this machine's frame and those of the machines behind it; the peer's and those of
    // the machines behind that.
    int frames_to_send = 0;
    int frames_to_receive = 0;
    // Frames sent there reach the machines whose distances from the frame's own machine agree in these bits.
    unsigned mask = 0;
    Connection connection;
    Frame in;  // the first `filled` bytes have been received, and the first `used` of them handled
    std::size_t filled = 0;
    std::size_t used = 0;
    int received = 0;            // frames of this exchange that were handled
    const Frame* out = nullptr;  // what is sent there in this operation, once all of it is here
    Frame own_out;               // memory for that, where it is not the same for all
    std::size_t sent = 0;
  };

  // Decide, once, who sends frames to whom.
  void plan_direct();
  void plan_forwarding();
  Peer& peer_of(int machine);
  // The machine at a distance behind another on the circle, and that distance.
  int behind(int machine, int distance) const noexcept { return (machine + distance) % machines_; }
  int distance(int from, int to) const noexcept { return (to - from + machines_) % machines_; }

  enum class Staged : std::uint8_t { none, all };
  void write_frame(const Call& call, Staged staged, Frame& frame) const;
  static void complete_frame(const Call& call, Frame& frame);
  void write_contributions(const Call& call);
  bool needs_staged(const Peer& peer, int origin, const Fingerprint& what) const;
  const Frame& outgoing(Peer& peer, const Call& call);
  static void append_without_staged(Frame& message, const Frame& frame, std::size_t ranks);
  void connect_leaders(const Call& call);
  // On a leader, once all local ranks have arrived.
  void exchange(const Call& call);
  void begin_exchange();
  // Sends what was put to be sent, and takes what is to be received.
  void run_exchange(const Call& call);
  // These return whether bytes moved.
  bool send(Peer& peer, const Call& call);
  bool receive(Peer& peer, const Call& call);
  bool take_frame(Peer& peer, const Call& call);
  void take_arrivals(Peer& peer, const Call& call, const Head& head, const std::byte* frame);
  void take_results(const Peer& peer, const Call& call, const Head& head, const std::byte* frame);
  void not_understood(const Peer& peer) const;
  bool has_to_send(const Peer& peer) const noexcept;
  bool is_done(const Peer& peer) const noexcept;
  bool done() const;
  int awaited_leader() const;
  void wait(const Call& call);

  RankContext& context_;
  ConnectionManager& connections_;
  const int machines_;
  std::vector<Peer> peers_;       // ascending by distance where frames are forwarded
  Frame with_staged_;             // this machine's, with what its ranks staged
  Frame without_staged_;          // and without
  std::vector<Frame> forwarded_;  // frames to forward, by distance from this machine; the first is not used
  int forwarded_count_ = 1;       // of them, from the first on without a gap
  bool connected_ = false;
  MachineContribution* contribution_ = nullptr;        // of the operation, if any
  const std::vector<std::size_t>* results_ = nullptr;  // their lengths, in the second exchange
  SpinPolicy spin_policy_;
};

}  // namespace collectives
