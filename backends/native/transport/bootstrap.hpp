// How the ranks of one machine come to map one segment.
//
// The lowest rank, the *host*, makes the segment and listens on a unix socket with a random name. The other
// ranks, the *guests*, learn the name and a random secret by another way (the group's store), connect, show
// the secret, and receive the segment's descriptor. The kernel vouches for the user id at both ends. Each
// rank hands over a descriptor of its own process, so that all can see it die, whatever namespaces they live
// in. The steps, each bounded by a deadline:
//
//   guest -> host   hello      version, secret, rank, size; its process descriptor
//   host -> guest   welcome    the segment, once all ranks have come, and between machines the leader's bell
//   host -> guest   processes  the others' process descriptors, in batches
//   guest -> host   attached   mapped and allocated
//   host -> guest   go         all are attached
//
// A host that gives up closes the connections, which the guests notice at once. A guest that ends is noticed
// at once by the host, from its first word on, which throws ErrorKind::peer_lost. Errors of that kind without
// a rank mean the process at the other end of the connection.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/clock.hpp"
#include "memory/descriptor.hpp"
#include "memory/segment.hpp"
#include "transport/control_page.hpp"
#include "transport/placement.hpp"
#include "transport/tcp.hpp"

namespace collectives {

// What a rank needs to reach those on other machines.
struct Network {
  std::string secret;       // of the group, 32 characters; proves that a connection is one of ours
  bool from_lanes = false;  // connect from the listeners' addresses, because the user chose them
  std::vector<std::vector<Endpoint>> endpoints;  // by rank, then by lane
  std::vector<Listener> listeners;               // this rank's, by lane
  Descriptor bell;                               // an eventfd that wakes the leader's courier
};

// What a rank holds once it is attached.
struct Membership {
  Membership() = default;
  Membership(Membership&&) = default;
  Membership& operator=(Membership&&) = default;

  // Ranks of this machine whose processes have ended, as far as the kernel can tell.
  std::vector<int> ended() const;

  int rank = 0;
  int size = 1;
  Placement placement = one_machine(1, 0);
  Network network;                   // empty on one machine
  std::shared_ptr<Segment> segment;  // threads that act as ranks may share one mapping
  Tuning tuning = default_tuning(1);
  Layout layout{Shape{.size = 1, .near_bytes = 0, .arena_bytes = 0, .standing_bytes = 0, .mail_bytes = 0}};
  std::vector<Descriptor>
      processes;  // by rank; empty for this rank, remote ones, and where the kernel has no such descriptors

  // Makes it that of a group of several machines.
  void span(Placement where, Network how);
};

// The membership of a group of one: memory of its own, nothing shared.
Membership alone();

class BootstrapHost {
 public:
  // `members`: ranks that may share memory with the first of them, which is this one. `size`: of the group.
  BootstrapHost(std::vector<int> members, int size);

  // Socket name and secret, for the guests alone.
  const std::string& address() const noexcept { return address_; }

  // Takes connections until all members have come or the deadline passed; returns the ranks that are missing.
  // Throws where one that has come ends.
  std::vector<int> accept(Nanoseconds deadline);

  // Replaces the defaults, before `share`. Throws std::invalid_argument where a value is out of bounds.
  void set_tuning(const Tuning& tuning);

  // Goes on without a member that cannot attach.
  void exclude(int rank);
  const std::vector<int>& members() const noexcept { return members_; }

  // Makes the segment and hands it to all guests. `several`: there are other machines.
  void share(bool several, Nanoseconds deadline);

  // Waits until all guests are attached or the deadline passed; returns the ranks that are not. Throws where
  // one of them ends.
  std::vector<int> await_attached(Nanoseconds deadline);

  // Lets the guests go and returns this rank's membership. The host is spent then. A guest that has just
  // ended is left to the group, whose ranks all see that, and some may be at work already.
  Membership release(Nanoseconds deadline);

 private:
  struct Guest {
    Descriptor socket;
    Descriptor process;
    bool attached = false;
  };
  // What happened first: somebody knocks, or a guest speaks or closes its connection.
  struct News {
    bool knock = false;
    std::vector<int> heard;
  };
  // Waits for news; none when the deadline passed. Throws where a guest's process has ended.
  News await_news(bool knocks, Nanoseconds deadline);
  [[noreturn]] void lose(int rank, const std::string& how) const;
  void welcome(int rank, const std::vector<int>& handed, bool several, Nanoseconds deadline);
  void admit(Descriptor socket, Nanoseconds deadline);

  Guest& guest(int rank) { return guests_[static_cast<std::size_t>(rank)]; }

  std::vector<int> members_;
  int size_;
  Tuning tuning_;
  std::string secret_;
  std::string address_;
  Descriptor listener_;
  std::vector<Guest> guests_;  // by rank; the entry of this rank holds its process
  std::shared_ptr<Segment> segment_;
  Layout layout_;
  Descriptor bell_;
};

class BootstrapGuest {
 public:
  // Connects to the host and says hello. Throws ErrorKind::network where nothing listens under that name
  // here.
  BootstrapGuest(const std::string& address, int rank, int size, Nanoseconds deadline);

  // Whether the host has answered before the deadline; throws when it has gone.
  bool answered(Nanoseconds deadline);

  // Maps the segment, allocates this rank's part, and says so. Returns whether there are other machines.
  bool attach(Nanoseconds deadline);

  // Waits for the host's go and returns this rank's membership. The guest is spent then.
  Membership await_release(Nanoseconds deadline);

 private:
  int rank_;
  int size_;
  Descriptor socket_;
  Membership membership_;
};

}  // namespace collectives
