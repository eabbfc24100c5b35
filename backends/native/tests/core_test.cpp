// The core without Python: ranks are threads. Made for sanitizers (CMake: -DCOLLECTIVES_TESTS=ON
// -DCOLLECTIVES_SANITIZE=thread).
//
// "shared" ranks use one mapping, so that a thread sanitizer sees what they do to each other. "attached"
// ranks go through sockets and descriptors and map the segment once each, as processes do.
#include <sys/eventfd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/group.hpp"
#include "kernels/kernels.hpp"
#include "tests/machines_test.hpp"

namespace collectives {
namespace {

constexpr Nanoseconds kLimit = 60 * kSecond;

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

template <class Function>
Error error_of(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error;
  }
  std::fprintf(stderr, "expected an error\n");
  std::abort();
}

using Groups = std::vector<std::unique_ptr<Group>>;

std::shared_ptr<Segment> segment_for(int size) {
  return std::make_shared<Segment>(Segment::create_private(Layout(shape_for(size)).total_bytes()));
}

Groups ranks_sharing(const std::shared_ptr<Segment>& segment, int size) {
  const Layout layout(shape_for(size));
  Groups groups;
  for (int r = 0; r < size; ++r) {
    Membership membership;
    membership.rank = r;
    membership.size = size;
    membership.placement = one_machine(size, r);
    membership.segment = segment;
    membership.tuning = default_tuning(size);
    membership.layout = layout;
    membership.processes.resize(static_cast<std::size_t>(size));
    groups.push_back(std::make_unique<Group>(std::move(membership), "shared group", kNever));
  }
  return groups;
}

Groups shared_ranks(int size) { return ranks_sharing(segment_for(size), size); }

void on_all(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(body, r);
  for (std::thread& thread : threads) thread.join();
}

Groups attached_ranks(int size) {
  Groups groups(static_cast<std::size_t>(size));
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  BootstrapHost host(all, size);
  on_all(size, [&](int r) {
    const Nanoseconds deadline = deadline_after(kLimit);
    auto& mine = groups[static_cast<std::size_t>(r)];
    if (r == 0) {
      CHECK(host.accept(deadline).empty());
      host.share(false, deadline);
      CHECK(host.await_attached(deadline).empty());
      mine = std::make_unique<Group>(host.release(deadline), "attached group", kNever);
    } else {
      BootstrapGuest guest(host.address(), r, size, deadline);
      CHECK(guest.answered(deadline));
      guest.attach(deadline);
      mine = std::make_unique<Group>(guest.await_release(deadline), "attached group", kNever);
    }
  });
  return groups;
}

// The ranks of each machine map a segment of their own; the leaders talk over loopback.
Groups machine_ranks(const std::vector<std::vector<int>>& machines) {
  int size = 0;
  for (const auto& machine : machines) size += static_cast<int>(machine.size());
  std::vector<std::vector<Endpoint>> endpoints(static_cast<std::size_t>(size));
  std::vector<Listener> listeners;
  for (auto& endpoint : endpoints) {
    listeners.push_back(listen_tcp("127.0.0.1", 16));
    endpoint = {listeners.back().endpoint};
  }
  Groups groups(static_cast<std::size_t>(size));
  for (const auto& machine : machines) {
    const Layout layout(shape_for(size, true));
    const auto segment = std::make_shared<Segment>(Segment::create_private(layout.total_bytes()));
    const Descriptor bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    for (const int r : machine) {
      const auto rank = static_cast<std::size_t>(r);
      Membership membership;
      membership.rank = r;
      membership.size = size;
      membership.segment = segment;
      membership.layout = layout;
      membership.tuning = default_tuning(size);
      membership.tuning.staged_bytes = membership.tuning.one_shot_bytes = layout.shape().near_bytes;
      membership.processes.resize(static_cast<std::size_t>(size));
      membership.network.bell = Descriptor(::dup(bell.get()));
      Network network;
      network.secret = std::string(32, 's');
      network.endpoints = endpoints;
      network.listeners.push_back(std::move(listeners[rank]));
      std::vector<std::string> hosts(machines.size(), "here");
      membership.span(place(machines, std::move(hosts), r), std::move(network));
      groups[rank] = std::make_unique<Group>(std::move(membership), "group of machines", kLimit);
    }
  }
  for (auto& group : groups) CHECK(group->link(deadline_after(kLimit)).empty());
  return groups;
}

class Rank {
 public:
  explicit Rank(Group& group) : group_(group) {}

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  std::size_t ranks() const { return static_cast<std::size_t>(group_.size()); }

  // Alternates between the caller's thread and the group's.
  void run(Request request) {
    if (++turn_ % 2 == 0 && group_.run(request, kLimit, nullptr)) return;
    const auto task = group_.enqueue(std::move(request), kLimit);
    CHECK(task->wait(kNever, nullptr));
    if (task->error() != nullptr) throw *task->error();
  }

 private:
  Group& group_;
  int turn_ = 0;
};

Request request_for(Kind kind, int root = 0) {
  Request request;
  request.kind = kind;
  request.root = root;
  request.reduction = {DType::int32, ReduceOp::sum, 1.0};
  return request;
}

std::byte* bytes_of(std::vector<std::int32_t>& values) { return reinterpret_cast<std::byte*>(values.data()); }

std::vector<std::int32_t> values_of(int rank, std::size_t count, int salt = 0) {
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
  Request request = request_for(Kind::all_reduce);
  request.data = bytes_of(values);
  request.count = count;
  me.run(request);
  CHECK(values == sum_of(me.size(), count));

  values = values_of(me.rank(), count);
  request = request_for(Kind::reduce, root);
  request.data = bytes_of(values);
  request.count = count;
  me.run(request);
  CHECK(values == (me.rank() == root ? sum_of(me.size(), count) : values_of(me.rank(), count)));

  std::vector<std::vector<std::int32_t>> parts;
  request = request_for(Kind::reduce_scatter);
  for (std::size_t r = 0; r < me.ranks(); ++r) parts.push_back(values_of(me.rank(), count + r));
  for (auto& part : parts) request.inputs.push_back({bytes_of(part), part.size() * 4});
  const std::size_t mine = count + static_cast<std::size_t>(me.rank());
  std::vector<std::int32_t> output(mine);
  request.data = bytes_of(output);
  request.count = mine;
  me.run(request);
  CHECK(output == sum_of(me.size(), mine));
}

void check_movements(Rank& me, std::size_t count, int root) {
  auto values = values_of(me.rank(), count);
  Request request = request_for(Kind::broadcast, root);
  request.data = bytes_of(values);
  request.count = count;
  me.run(request);
  CHECK(values == values_of(root, count));

  std::vector<std::vector<std::int32_t>> outputs;
  for (std::size_t r = 0; r < me.ranks(); ++r) outputs.emplace_back(count + 3 * r);
  values = values_of(me.rank(), count + 3 * static_cast<std::size_t>(me.rank()));
  request = request_for(Kind::all_gather);
  for (auto& output : outputs) request.outputs.push_back({bytes_of(output), output.size() * 4});
  request.input = bytes_of(values);
  request.count = values.size();
  me.run(request);
  for (int r = 0; r < me.size(); ++r) {
    const auto& output = outputs[static_cast<std::size_t>(r)];
    CHECK(output == values_of(r, output.size()));
  }

  values = values_of(me.rank(), count);
  for (auto& output : outputs) output.assign(count, -1);
  request = request_for(Kind::gather, root);
  for (auto& output : outputs) request.outputs.push_back({bytes_of(output), count * 4});
  if (me.rank() != root) request.outputs.clear();
  request.input = bytes_of(values);
  request.count = count;
  me.run(request);
  for (int r = 0; r < me.size() && me.rank() == root; ++r) {
    CHECK(outputs[static_cast<std::size_t>(r)] == values_of(r, count));
  }

  for (std::size_t r = 0; r < me.ranks(); ++r) outputs[r] = values_of(root, count, static_cast<int>(r));
  values.assign(count, -1);
  request = request_for(Kind::scatter, root);
  for (auto& output : outputs) request.inputs.push_back({bytes_of(output), count * 4});
  if (me.rank() != root) request.inputs.clear();
  request.data = bytes_of(values);
  request.count = count;
  me.run(request);
  CHECK(values == values_of(root, count, me.rank()));
}

void check_all_to_all(Rank& me, std::size_t count) {
  const auto length = [&](std::size_t from, std::size_t to) {
    return from == 0 ? count + to : (from + 2 * to) % 5;
  };
  const auto mine = static_cast<std::size_t>(me.rank());
  std::vector<std::vector<std::int32_t>> inputs;
  std::vector<std::vector<std::int32_t>> outputs;
  Request request = request_for(Kind::all_to_all);
  for (std::size_t r = 0; r < me.ranks(); ++r) {
    inputs.push_back(values_of(me.rank(), length(mine, r), static_cast<int>(r)));
    outputs.emplace_back(length(r, mine));
  }
  for (std::size_t r = 0; r < me.ranks(); ++r) {
    request.inputs.push_back({bytes_of(inputs[r]), inputs[r].size() * 4});
    request.outputs.push_back({bytes_of(outputs[r]), outputs[r].size() * 4});
  }
  me.run(request);
  for (std::size_t r = 0; r < me.ranks(); ++r) {
    CHECK(outputs[r] == values_of(static_cast<int>(r), length(r, mine), me.rank()));
  }
}

void test_collectives(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Rank me(*groups[static_cast<std::size_t>(r)]);
    int root = 0;
    for (const std::size_t count : {0, 1, 22, 23, 4000, 16385, 70'001, 400'003}) {
      root = (root + 1) % me.size();
      me.run(request_for(Kind::barrier));
      check_reductions(me, count, root);
      check_movements(me, count, root);
      check_all_to_all(me, count);
    }
    groups[static_cast<std::size_t>(r)]->shutdown(true);
  });
}

// Sizes around every limit in an order of chance, so that windows of neighbouring operations meet in every
// way and wrap; with failed operations between them, which must leave all ranks' windows in step.
void test_windows(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Rank me(*groups[static_cast<std::size_t>(r)]);
    std::minstd_rand random(7);  // the same on every rank
    constexpr std::size_t kLimits[] = {22, 1024, 16384, 65536, 262'144};
    for (int round = 0; round < 30; ++round) {
      const std::size_t limit = kLimits[random() % std::size(kLimits)];
      const std::size_t count = limit - 2 + random() % 4;
      const int root = static_cast<int>(random() % me.ranks());
      check_reductions(me, count, root);
      if (round % 3 == 0) check_movements(me, count / 2, root);
      if (round % 4 == 0) {
        std::vector<std::int32_t> values(round % 8 == 0 ? count + static_cast<std::size_t>(r) : count, r);
        Request request = request_for(round % 8 == 0 || r != 0 ? Kind::all_reduce : Kind::broadcast);
        request.data = bytes_of(values);
        request.count = values.size();
        CHECK(error_of([&] { me.run(request); }).kind() == ErrorKind::mismatch);
      }
      check_all_to_all(me, count / 3);
    }
    groups[static_cast<std::size_t>(r)]->shutdown(true);
  });
}

void test_short_collectives(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Rank me(*groups[static_cast<std::size_t>(r)]);
    for (int i = 0; i < 40; ++i) {
      const std::size_t counts[] = {0, 1, 22, 23, 900};
      const std::size_t count = counts[i % 5];
      me.run(request_for(Kind::barrier));
      check_reductions(me, count, i % me.size());
      check_movements(me, count, i % me.size());
      check_all_to_all(me, count);
    }
    groups[static_cast<std::size_t>(r)]->shutdown(true);
  });
}

void test_mismatch(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    for (int round = 0; round < 50; ++round) {
      std::vector<std::int32_t> values(r == 1 ? 100'000 : 10, r);
      Request request = request_for(round % 2 == 0 && r == 0 ? Kind::broadcast : Kind::all_reduce);
      request.data = bytes_of(values);
      request.count = values.size();
      const Error error = error_of([&] { group.run(request, kLimit, nullptr); });
      CHECK(error.kind() == ErrorKind::mismatch);
      CHECK(values == std::vector<std::int32_t>(values.size(), r));
    }
    group.shutdown(true);
  });
}

void test_messages(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    const int size = group.size();
    // Several threads of a rank exchange with all others, with tags of their own, while collectives run.
    const auto exchange = [&](std::uint32_t tag) {
      std::minstd_rand random(tag);  // the same lengths on every rank
      for (int round = 0; round < 20; ++round) {
        const std::size_t count = random() % (round % 5 == 0 ? 300'000 : 3000);
        std::vector<std::shared_ptr<Transfer>> transfers;
        std::vector<std::vector<std::int32_t>> received(static_cast<std::size_t>(size),
                                                        std::vector<std::int32_t>(count));
        auto sent = values_of(r, count, round);
        const auto envelope = [&](int peer) { return Envelope{peer, tag, DType::int32, count * 4}; };
        const bool at_once = round % 2 == 0;
        for (int p = 0; p < size; ++p) {
          if (at_once && group.send_at_once(envelope(p), bytes_of(sent))) continue;
          transfers.push_back(group.send(envelope(p), bytes_of(sent), kLimit));
        }
        for (int p = size - 1; p >= 0; --p) {
          std::byte* const data = bytes_of(received[static_cast<std::size_t>(p)]);
          if (at_once && group.receive_at_once(envelope(p), data)) continue;
          transfers.push_back(group.receive(envelope(p), data, kLimit));
        }
        for (const auto& transfer : transfers) {
          CHECK(transfer->wait(kNever, nullptr));
          CHECK(transfer->error() == nullptr);
        }
        for (int p = 0; p < size; ++p)
          CHECK(received[static_cast<std::size_t>(p)] == values_of(p, count, round));
      }
    };
    std::thread first(exchange, 1);
    std::thread second(exchange, 2);
    Rank me(group);
    for (int i = 0; i < 50; ++i) check_reductions(me, 3000, 0);
    first.join();
    second.join();
    group.shutdown(true);
  });
}

void test_messages_at_once(Groups groups) {
  Group& sender = *groups[0];
  Group& receiver = *groups[1];
  std::int32_t sent = 7;
  std::int32_t got = 0;
  std::byte* const from = reinterpret_cast<std::byte*>(&sent);
  std::byte* const to = reinterpret_cast<std::byte*>(&got);
  const Envelope there{1, 3, DType::int32, 4};
  const Envelope back{0, 3, DType::int32, 4};
  const Envelope other_tag{0, 4, DType::int32, 4};
  CHECK(!receiver.receive_at_once(back, to));  // nothing has come
  CHECK(sender.send_at_once(there, from));
  CHECK(!receiver.receive_at_once(other_tag, to));  // another message is the first
  CHECK(receiver.receive_at_once(back, to) && got == 7);
  // A receive that was posted before has the first message.
  std::int32_t first = 0;
  const auto posted = receiver.receive(back, reinterpret_cast<std::byte*>(&first), kLimit);
  sent = 8;
  CHECK(sender.send_at_once(there, from));
  sent = 9;
  CHECK(sender.send_at_once(there, from));
  got = 0;
  if (!receiver.receive_at_once(back, to)) {
    CHECK(receiver.receive(back, to, kLimit)->wait(kNever, nullptr));
  }
  CHECK(posted->wait(kNever, nullptr));
  CHECK(first == 8 && got == 9);
  // Until the ring is full; then order is kept with what waits for room.
  std::vector<std::int32_t> many(1024);
  const Envelope brief{1, 5, DType::int32, 4096};
  int left = 0;
  for (; sender.send_at_once(brief, bytes_of(many)); ++left) many[0] = left + 1;
  const auto waiting = sender.send(brief, bytes_of(many), kLimit);
  CHECK(!sender.send_at_once(brief, bytes_of(many)));
  std::vector<std::int32_t> taken(1024);
  for (int i = 0; i <= left; ++i) {
    const Envelope same{0, 5, DType::int32, 4096};
    if (!receiver.receive_at_once(same, bytes_of(taken))) {
      CHECK(receiver.receive(same, bytes_of(taken), kLimit)->wait(kNever, nullptr));
    }
    CHECK(taken[0] == i);
  }
  CHECK(waiting->wait(kNever, nullptr));
  on_all(2, [&](int r) { groups[static_cast<std::size_t>(r)]->shutdown(true); });
}

void test_any_source_and_background(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    constexpr std::size_t kCount = 200'000;  // more than a ring
    const Envelope to_first{0, 5, DType::int32, kCount * 4};
    const Envelope from_any{kAnyRank, 5, DType::int32, kCount * 4};
    auto values = values_of(r, kCount);
    if (r != 0) {
      const auto task = group.send(to_first, bytes_of(values), kLimit);
      while (!task->finished()) std::this_thread::yield();  // nobody waits: the background thread drives
    } else {
      for (int i = 1; i < group.size(); ++i) {
        const auto task = group.receive(from_any, bytes_of(values), kLimit);
        CHECK(task->wait(kNever, nullptr));
        CHECK(values == values_of(task->source(), kCount));
      }
    }
    group.shutdown(true);
  });
}

void test_abort(Groups groups) {
  const int size = static_cast<int>(groups.size());
  on_all(size, [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    std::vector<std::int32_t> values(10);
    Request request = request_for(Kind::all_reduce);
    request.data = bytes_of(values);
    request.count = values.size();
    std::thread aborter;
    if (r == 0) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        group.abort("enough");
      });
    }
    if (r != size - 1) {  // one never comes
      const auto task = group.receive({size - 1, 1, DType::int32, 4}, bytes_of(values), kLimit);
      CHECK(error_of([&] { group.run(request, kLimit, nullptr); }).kind() == ErrorKind::aborted);
      CHECK(task->wait(kNever, nullptr));
      CHECK(task->error()->kind() == ErrorKind::aborted);
    }
    if (r == 0) aborter.join();
    if (r == size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));  // nor leaves before
    group.shutdown(false);
  });
}

void test_timeout_and_departure(Groups groups) {
  const int size = static_cast<int>(groups.size());
  Group& last = *groups.back();
  on_all(size - 1, [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    std::int32_t value = 0;
    const auto task = group.receive({size - 1, 1, DType::int32, 4}, reinterpret_cast<std::byte*>(&value),
                                    50 * kMillisecond);
    CHECK(task->wait(kNever, nullptr));
    CHECK(task->error()->kind() == ErrorKind::timeout);
  });
  on_all(size - 1, [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    std::int32_t value = 0;
    const auto other =
        group.receive({size - 1, 1, DType::int32, 4}, reinterpret_cast<std::byte*>(&value), kLimit);
    if (r == 0) last.shutdown(true);
    CHECK(other->wait(kNever, nullptr));
    CHECK(other->error()->kind() == ErrorKind::peer_lost && other->error()->rank() == size - 1);
    const Error error = error_of([&] { group.run(request_for(Kind::barrier), kLimit, nullptr); });
    CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == size - 1);
  });
}

// Those who wait leave a core that they share with the rank they wait for, if they know that they share it.
void test_core_of_a_rank_that_never_waits() {
  const std::shared_ptr<Segment> segment = segment_for(2);
  const Groups groups = ranks_sharing(segment, 2);
  const Layout layout(shape_for(2));
  const auto page = [&](int r) -> ControlPage& {
    return *reinterpret_cast<ControlPage*>(segment->data() + layout.rank_offset(r));
  };
  std::thread first([&] { Rank(*groups[0]).run(request_for(Kind::barrier)); });
  while (page(0).arrivals[1].sequence.load(std::memory_order_acquire) == 0) std::this_thread::yield();
  Rank(*groups[1]).run(request_for(Kind::barrier));  // finds that the other has come
  first.join();
  CHECK(page(0).status.core.load() != 0);
  CHECK(page(1).status.core.load() != 0);
  page(0).status.core.store(0);
  page(1).status.core.store(0);
  const Envelope to{1, 0, DType::uint8, 1};
  const std::byte letter{};
  CHECK(groups[0]->send_at_once(to, &letter));  // and a sender waits for nobody
  CHECK(page(0).status.core.load() != 0);
  std::byte come{};
  const Envelope from{0, 0, DType::uint8, 1};
  CHECK(groups[1]->receive_at_once(from, &come));
  CHECK(page(1).status.core.load() != 0);
}

void test_many_groups() {
  for (int round = 0; round < 20; ++round) {
    Groups groups = attached_ranks(3);
    on_all(3, [&](int r) { Rank(*groups[static_cast<std::size_t>(r)]).run(request_for(Kind::barrier)); });
    // Some end in order, some with the object.
    if (round % 2 == 0) on_all(3, [&](int r) { groups[static_cast<std::size_t>(r)]->shutdown(true); });
  }
}

}  // namespace
}  // namespace collectives

// An argument chooses the tests whose names contain it.
int main(int count, char** arguments) {
  using namespace collectives;
  std::vector<std::pair<const char*, std::function<void()>>> tests = {
      {"collectives, 1 rank", [] { test_collectives(shared_ranks(1)); }},
      {"collectives, 2 ranks", [] { test_collectives(shared_ranks(2)); }},
      {"collectives, 3 ranks", [] { test_collectives(shared_ranks(3)); }},
      {"collectives, 5 attached ranks", [] { test_collectives(attached_ranks(5)); }},
      {"windows, 2 ranks", [] { test_windows(shared_ranks(2)); }},
      {"windows, 3 attached ranks", [] { test_windows(attached_ranks(3)); }},
      {"mismatch", [] { test_mismatch(shared_ranks(3)); }},
      {"short collectives, 2 machines of 2", [] { test_short_collectives(machine_ranks({{0, 1}, {2, 3}})); }},
      {"short collectives, 3 machines", [] { test_short_collectives(machine_ranks({{0, 2}, {1}, {3}})); }},
      {"mismatch between machines", [] { test_mismatch(machine_ranks({{0, 1}, {2, 3}})); }},
      {"abort between machines", [] { test_abort(machine_ranks({{0}, {1, 2}})); }},
      {"messages, 2 ranks", [] { test_messages(shared_ranks(2)); }},
      {"messages, 3 attached ranks", [] { test_messages(attached_ranks(3)); }},
      {"messages at once", [] { test_messages_at_once(shared_ranks(2)); }},
      {"any source", [] { test_any_source_and_background(shared_ranks(3)); }},
      {"abort", [] { test_abort(shared_ranks(3)); }},
      {"timeout and departure", [] { test_timeout_and_departure(shared_ranks(3)); }},
      {"core of a rank that never waits", [] { test_core_of_a_rank_that_never_waits(); }},
      {"many groups", [] { test_many_groups(); }},
  };
  for (auto& test : machine_tests()) tests.push_back(std::move(test));
  for (const auto& [name, test] : tests) {
    if (count > 1 && std::strstr(name, arguments[1]) == nullptr) continue;
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::printf("all passed\n");
  return 0;
}
