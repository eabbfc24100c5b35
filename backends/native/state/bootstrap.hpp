// How the ranks of one machine come to map one segment.
//
// The lowest rank, the leader, makes the segment and listens on a unix socket with a random name. The others,
// its followers, get the name through the group's store, connect, and receive the segment's descriptor. The
// kernel vouches for the user id at both ends, and both prove that they know the group's key. Each rank hands
// over a descriptor of its own process, so that all can see it die, whatever namespaces they live in. The
// steps, each bounded by a deadline:
//
//   follower -> leader   process    its process descriptor
//   both                            the handshake (hello.hpp)
//   leader -> follower   welcome    the segment, once all ranks have come; between machines also the eventfd
//                                   of the leader's connection manager
//   leader -> follower   processes  the others' process descriptors, in batches
//   follower -> leader   attached   mapped and allocated
//   leader -> follower   go         all are attached
//
// A leader that gives up closes the connections, which the followers notice at once. The leader notices at
// once when a follower ends after the handshake, and throws ErrorKind::peer_lost. Errors of that kind without
// a rank mean the process at the other end of the connection.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.hpp"
#include "memory/descriptor.hpp"
#include "memory/segment.hpp"
#include "security/handshake.hpp"
#include "state/membership.hpp"

namespace collectives {

class BootstrapLeader {
 public:
  // `name`: of the socket. `members`: ranks that may share memory with the first of them, which is this one.
  // `size`: of the group. `key`: of the group.
  BootstrapLeader(const std::string& name, std::vector<int> members, int size, std::string key);

  // Takes connections until all members have come or the deadline passed; returns the ranks that are missing.
  // Throws where one that has come ends.
  std::vector<int> accept(Nanoseconds deadline);

  // Replaces the defaults, before `share`. Throws std::invalid_argument where a value is out of bounds.
  void set_tuning(const Tuning& tuning);

  // Goes on without a member that cannot attach.
  void exclude(int rank);
  const std::vector<int>& members() const noexcept { return members_; }

  // Makes the segment and hands it to all followers.
  void share(bool spans_machines, Nanoseconds deadline);

  // Waits until all followers are attached or the deadline passed; returns the ranks that are not. Throws
  // where one of them ends.
  std::vector<int> await_attached(Nanoseconds deadline);

  // Lets the followers go and returns this rank's membership; to be called once. A follower that has just
  // ended is left to the group, whose ranks all see that, and some may be at work already.
  Membership release(Nanoseconds deadline);

  // Ends all connections; nothing else may be called afterwards.
  void close() noexcept;

 private:
  struct Follower {
    Descriptor socket;
    Descriptor process;
    bool attached = false;
  };
  // A connection of which no rank is known yet.
  struct Newcomer {
    Descriptor socket;
    Descriptor process;
    std::optional<Handshake> handshake;  // once its process descriptor has come
    bool readable = false;
  };
  // What happened first: a new connection, or followers that sent something or closed theirs.
  struct Events {
    bool connection = false;
    std::vector<int> readable;  // ranks
  };
  // Waits for events; none when the deadline passed. Throws where a follower's process has ended.
  Events await_events(bool connections, Nanoseconds deadline);
  [[noreturn]] void throw_peer_lost(int rank, const std::string& how) const;
  void welcome(int rank, const std::vector<int>& handed, bool spans_machines, Nanoseconds deadline);
  void take_newcomer();
  // Returns whether it may stay.
  bool go_on(Newcomer& newcomer);
  void admit(Newcomer& newcomer, Handshake& handshake);

  Follower& follower(int rank) { return followers_[static_cast<std::size_t>(rank)]; }

  std::vector<int> members_;
  int size_;
  Tuning tuning_;
  std::string key_;
  Descriptor listener_;
  std::deque<Newcomer> newcomers_;
  std::vector<Follower> followers_;  // by rank; the entry of this rank holds its process
  std::shared_ptr<Segment> segment_;
  SegmentLayout layout_;
  Descriptor leader_event_;
};

class BootstrapFollower {
 public:
  // Connects to the leader. Throws ErrorKind::peer_lost where nothing listens under that name here.
  BootstrapFollower(const std::string& name, int leader, int rank, int size, std::string key,
                    Nanoseconds deadline);

  // Whether the leader's process has ended, as far as can be told.
  bool leader_ended() const noexcept;

  // Whether the leader and this rank have proved to each other before the deadline that they are of one
  // group. Throws ErrorKind::peer_lost where the leader has closed the connection, and ErrorKind::network
  // where it does not know the key.
  bool proved(Nanoseconds deadline);

  // Whether the leader has answered before the deadline; throws when it has gone.
  bool answered(Nanoseconds deadline);

  // Maps the segment, allocates this rank's part without the staging buffer, and says so. Returns whether the
  // group spans machines.
  bool attach(Nanoseconds deadline);

  // Waits for the leader's go and returns this rank's membership; to be called once.
  Membership await_release(Nanoseconds deadline);

  // Ends the connection; nothing else may be called afterwards.
  void close() noexcept { socket_.reset(); }

 private:
  int rank_;
  int size_;
  int leader_process_ = 0;
  Descriptor socket_;
  Handshake handshake_;
  Membership membership_;
};

}  // namespace collectives
