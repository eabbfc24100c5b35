// What a rank holds once it is attached to its group's shared memory, and before the group exists.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "memory/descriptor.hpp"
#include "memory/segment.hpp"
#include "selection/tuning.hpp"
#include "sockets/tcp_socket.hpp"
#include "state/segment_layout.hpp"
#include "state/topology.hpp"

namespace collectives {

// What a rank needs to reach those on other machines.
struct Network {
  std::string key;             // of the group; both ends of a connection prove that they know it
  bool own_user_only = false;  // only processes of this user on this machine are spoken with
  bool encrypts = false;       // what ranks send each other is encrypted
  bool from_lanes = false;     // connect from the listeners' addresses, because the user chose them
  std::vector<std::vector<Endpoint>> endpoints;  // by rank, then by lane
  std::vector<Listener> listeners;               // this rank's, by lane
};

struct Membership {
  Membership() = default;
  Membership(Membership&&) = default;
  Membership& operator=(Membership&&) = default;

  // Ranks of this machine whose processes have ended, as far as the kernel can tell.
  std::vector<int> ended() const;
  // Makes it that of a group that spans machines. `on_host`: see `ranks_on_host`.
  void span(Topology where, Network how, int on_host);

  int rank = 0;
  int size = 1;
  Topology topology = single_machine(1, 0);
  // Ranks that this one's kernel runs, where the group spans machines: those of other containers are on other
  // machines, and use the same cores.
  int ranks_on_host = 1;
  Network network;                   // empty on one machine
  Descriptor leader_event;           // an eventfd that wakes the leader's connection manager; empty likewise
  std::shared_ptr<Segment> segment;  // threads that act as ranks may share one mapping
  Tuning tuning = default_tuning(1);
  SegmentLayout layout{
      SegmentShape{.size = 1, .slot_bytes = 0, .buffer_bytes = 0, .fixed_bytes = 0, .mail_bytes = 0}};
  // Threads that move and reduce a long message of this rank, its own among them, from 1 to
  // WorkerPool::kMostParts; and whether each of them has a core.
  unsigned threads = 1;
  bool workers_linger = true;
  // By rank; empty for this rank, remote ones, and where the kernel has no such descriptors.
  std::vector<ProcessDescriptor> processes;
};

// The membership of a group of one: memory of its own, nothing shared.
Membership single_rank_membership();

}  // namespace collectives
