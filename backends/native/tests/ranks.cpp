#include "tests/ranks.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "memory/descriptor.hpp"
#include "state/bootstrap.hpp"

namespace collectives {

std::shared_ptr<Segment> segment_for(int size) {
  return std::make_shared<Segment>(Segment::create_private(SegmentLayout(shape_for(size)).total_bytes()));
}

Membership membership_of(const std::shared_ptr<Segment>& segment, int rank, int size) {
  Membership membership;
  membership.rank = rank;
  membership.size = size;
  membership.topology = single_machine(size, rank);
  membership.segment = segment;
  membership.tuning = default_tuning(size);
  membership.layout = SegmentLayout(shape_for(size));
  membership.processes.resize(static_cast<std::size_t>(size));
  return membership;
}

namespace {

// More threads than cores, which no worker may look for work on.
void give_threads(Membership& membership, unsigned threads) {
  membership.threads = threads;
  membership.workers_linger = threads <= 2;
  membership.tuning.threads = threads;
}

}  // namespace

Groups ranks_sharing(const std::shared_ptr<Segment>& segment, int size, unsigned threads) {
  Groups groups;
  for (int r = 0; r < size; ++r) {
    Membership membership = membership_of(segment, r, size);
    give_threads(membership, threads);
    groups.push_back(std::make_unique<Group>(std::move(membership), "shared group", kNever, new_record()));
  }
  return groups;
}

void on_all(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(body, r);
  for (std::thread& thread : threads) thread.join();
}

Groups attached_ranks(int size) {
  Groups groups(static_cast<std::size_t>(size));
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  static std::atomic<int> turn{0};
  // Relaxed: nothing depends on it.
  const std::string name = "collectives-test-" + std::to_string(::getpid()) + "-" +
                           std::to_string(turn.fetch_add(1, std::memory_order_relaxed));
  BootstrapLeader leader(name, all, size, std::string(kTestKey));
  on_all(size, [&](int r) {
    const Nanoseconds deadline = deadline_after(kLimit);
    auto& mine = groups[static_cast<std::size_t>(r)];
    if (r == 0) {
      CHECK(leader.accept(deadline).empty());
      leader.share(false, deadline);
      CHECK(leader.await_attached(deadline).empty());
      mine = std::make_unique<Group>(leader.release(deadline), "attached group", kNever, new_record());
    } else {
      BootstrapFollower follower(name, 0, r, size, std::string(kTestKey), deadline);
      CHECK(follower.proved(deadline) && follower.answered(deadline));
      follower.attach(deadline);
      mine =
          std::make_unique<Group>(follower.await_release(deadline), "attached group", kNever, new_record());
    }
  });
  return groups;
}

Ports listen_for(int size) {
  Ports ports;
  for (int r = 0; r < size; ++r) {
    ports.listeners.push_back(listen_tcp("127.0.0.1", std::max(size, 16)));
    ports.endpoints.push_back({ports.listeners.back().endpoint});
  }
  return ports;
}

Membership membership_between_machines(const Machines& machines, int rank,
                                       const std::shared_ptr<Segment>& segment, const Descriptor& event,
                                       Ports& ports) {
  const int size = static_cast<int>(ports.endpoints.size());
  Membership membership;
  membership.rank = rank;
  membership.size = size;
  membership.segment = segment;
  membership.layout = SegmentLayout(shape_for(size, true));
  membership.tuning = tuning_between_machines(default_tuning(size), membership.layout.shape().slot_bytes);
  membership.processes.resize(static_cast<std::size_t>(size));
  membership.leader_event = Descriptor(::fcntl(event.get(), F_DUPFD_CLOEXEC, 0));
  Network network;
  network.key = kTestKey;
  network.endpoints = ports.endpoints;
  network.listeners.push_back(std::move(ports.listeners[static_cast<std::size_t>(rank)]));
  std::vector<std::string> hosts(machines.size(), "here");
  membership.span(make_topology(machines, std::move(hosts), rank), std::move(network), size);
  return membership;
}

Groups machine_ranks(const Machines& machines, bool connected,
                     std::vector<std::shared_ptr<Segment>>* segments, unsigned threads) {
  int size = 0;
  for (const auto& machine : machines) size += static_cast<int>(machine.size());
  Ports ports = listen_for(size);
  Groups groups(static_cast<std::size_t>(size));
  for (const auto& machine : machines) {
    const auto segment = std::make_shared<Segment>(
        Segment::create_private(SegmentLayout(shape_for(size, true)).total_bytes()));
    const Descriptor event = make_event();
    if (segments != nullptr) segments->push_back(segment);
    for (const int r : machine) {
      Membership membership = membership_between_machines(machines, r, segment, event, ports);
      give_threads(membership, threads);
      groups[static_cast<std::size_t>(r)] =
          std::make_unique<Group>(std::move(membership), "group of machines", kLimit, new_record());
    }
  }
  for (auto& group : groups) CHECK(!connected || group->connect(deadline_after(kLimit)).empty());
  return groups;
}

void Rank::run(Request request) {
  if (++runs_ % 2 == 0) return group_.run(request, kLimit, nullptr);
  const auto task = group_.enqueue(std::move(request), kLimit);
  CHECK(task->wait(kNever, nullptr));
  if (task->error() != nullptr) throw *task->error();
}

Request request_for(Opcode opcode, int root) {
  Request request;
  request.opcode = opcode;
  request.root = root;
  request.reduction = {DType::int32, ReduceOp::sum, 1.0};
  return request;
}

std::byte* bytes_of(std::vector<std::int32_t>& values) { return reinterpret_cast<std::byte*>(values.data()); }

std::vector<std::int32_t> values_of(int rank, std::size_t count, int salt) {
  std::vector<std::int32_t> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::int32_t>(i * 7) + rank * 1001 + salt;
  return values;
}

std::vector<std::int32_t> sum_of(int size, std::size_t count) {
  std::vector<std::int32_t> total(count);
  for (int r = 0; r < size; ++r) {
    const auto values = values_of(r, count);
    for (std::size_t i = 0; i < count; ++i) total[i] += values[i];
  }
  return total;
}

void check_reductions(Rank& me, std::size_t count, int root) {
  auto values = values_of(me.rank(), count);
  Request request = request_for(Opcode::all_reduce);
  request.data = bytes_of(values);
  request.count = count;
  me.run(request);
  CHECK(values == sum_of(me.size(), count));

  values = values_of(me.rank(), count);
  request = request_for(Opcode::reduce, root);
  request.data = bytes_of(values);
  request.count = count;
  me.run(request);
  CHECK(values == (me.rank() == root ? sum_of(me.size(), count) : values_of(me.rank(), count)));

  std::vector<std::vector<std::int32_t>> parts;
  request = request_for(Opcode::reduce_scatter);
  for (std::size_t r = 0; r < me.ranks(); ++r) parts.push_back(values_of(me.rank(), count + r));
  for (auto& part : parts) request.inputs.push_back({bytes_of(part), part.size() * 4});
  const std::size_t mine = count + static_cast<std::size_t>(me.rank());
  std::vector<std::int32_t> output(mine);
  request.data = bytes_of(output);
  request.count = mine;
  me.run(request);
  CHECK(output == sum_of(me.size(), mine));
}

}  // namespace collectives
