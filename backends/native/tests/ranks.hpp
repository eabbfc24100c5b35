// Ranks of tests, as threads of one process.
//
// Shared ranks use one mapping, so that a thread sanitizer sees what they do to each other. Attached ranks go
// through sockets and descriptors and map the segment once each, as processes do. The ranks of machines share
// a mapping for each machine, and talk to the others over loopback.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/group.hpp"
#include "tests/testing.hpp"

namespace collectives {

inline constexpr Nanoseconds kLimit = 60 * kSecond;

using Groups = std::vector<std::unique_ptr<Group>>;
using Machines = std::vector<std::vector<int>>;

inline std::shared_ptr<OperationRecord> new_record() { return std::make_shared<OperationRecord>(16); }
std::shared_ptr<Segment> segment_for(int size);
Membership membership_of(const std::shared_ptr<Segment>& segment, int rank, int size);
// `threads`: of each rank, for long messages.
Groups ranks_sharing(const std::shared_ptr<Segment>& segment, int size, unsigned threads = 1);
inline Groups shared_ranks(int size, unsigned threads = 1) {
  return ranks_sharing(segment_for(size), size, threads);
}
Groups attached_ranks(int size);

// The addresses of the ranks of machines, all of this one.
struct Ports {
  std::vector<std::vector<Endpoint>> endpoints;
  std::vector<Listener> listeners;  // by rank, each until its membership takes it
};
Ports listen_for(int size);
inline constexpr std::string_view kTestKey = "a key of the tests, of 32 bytes..";
// `segment` and `event` are those of the rank's machine.
Membership membership_between_machines(const Machines& machines, int rank,
                                       const std::shared_ptr<Segment>& segment, const Descriptor& event,
                                       Ports& ports);
// Not connected yet where `connected` is false: each rank is to call `Group::connect`. `segments` gets those
// of the machines.
Groups machine_ranks(const Machines& machines, bool connected = true,
                     std::vector<std::shared_ptr<Segment>>* segments = nullptr, unsigned threads = 1);

// Runs `body(rank)` on a thread for each rank.
void on_all(int size, const std::function<void(int)>& body);

class Rank {
 public:
  explicit Rank(Group& group) : group_(group) {}

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  std::size_t ranks() const { return static_cast<std::size_t>(group_.size()); }
  Group& group() const { return group_; }

  // Executes on the caller's thread and on the group's, alternately.
  void run(Request request);

 private:
  Group& group_;
  int runs_ = 0;
};

Request request_for(Opcode opcode, int root = 0);  // sums of int32
std::byte* bytes_of(std::vector<std::int32_t>& values);
std::vector<std::int32_t> values_of(int rank, std::size_t count, int salt = 0);
std::vector<std::int32_t> sum_of(int size, std::size_t count);

// all_reduce, reduce and reduce_scatter of int32.
void check_reductions(Rank& me, std::size_t count, int root);

}  // namespace collectives
