// Long collectives and messages between machines; the machines are sets of threads, joined by TCP.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "algorithms/machine_partials.hpp"
#include "kernels/kernels.hpp"
#include "tests/ranks.hpp"

namespace collectives {
namespace {

using Bytes = std::vector<std::byte>;

class World {
 public:
  explicit World(const Machines& machines)
      : groups_(machine_ranks(machines, false)), topology_(make_topology(machines, {}, 0)) {}

  const Topology& topology() const { return topology_; }
  Group& group(int rank) { return *groups_[static_cast<std::size_t>(rank)]; }

  void on_all(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < static_cast<int>(groups_.size()); ++r) {
      threads.emplace_back([this, &body, r] {
        try {
          CHECK(group(r).connect(now_ns() + kLimit).empty());
          body(r);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "rank %d: %s\n", r, error.what());
          std::abort();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  Groups groups_;
  Topology topology_;
};

class WorldRank : public Rank {
 public:
  WorldRank(World& world, int rank) : Rank(world.group(rank)), world_(world) {}

  const Topology& topology() const { return world_.topology(); }

 private:
  World& world_;
};

Request request_for(Opcode opcode, const Reduction& reduction, int root = 0) {
  Request request;
  request.opcode = opcode;
  request.reduction = reduction;
  request.root = root;
  return request;
}

constexpr Reduction kMoved{DType::uint8, ReduceOp::sum, 1};

// Small numbers of every kind, the same for the same rank and salt.
Bytes numbers(DType dtype, std::size_t count, int rank, std::size_t salt = 0) {
  Bytes bytes(count * size_of(dtype));
  std::minstd_rand random(static_cast<unsigned>(rank * 31 + static_cast<int>(salt) + 1));
  if (dtype == DType::float32 || dtype == DType::complex64) {
    for (std::size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      const float value = static_cast<float>(random() % 100'000) / 7.0F - 5000.0F;
      std::memcpy(bytes.data() + i, &value, 4);
    }
    return bytes;
  }
  for (std::size_t i = 0; i < bytes.size(); i += 2) {
    const auto two = static_cast<std::uint16_t>(random() >> 8);
    std::memcpy(bytes.data() + i, &two, std::min<std::size_t>(2, bytes.size() - i));
  }
  return bytes;
}

// In one piece, as sanitizers look at every comparison.
bool same(const Bytes& one, const Bytes& other) {
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

struct Case {
  DType dtype;
  ReduceOp op;
  double factor;
};

constexpr Case kCases[] = {
    {DType::float32, ReduceOp::sum, 1},       {DType::bfloat16, ReduceOp::sum, 1},
    {DType::float16, ReduceOp::avg, 5},       {DType::int8, ReduceOp::avg, 5},
    {DType::int64, ReduceOp::avg, 5},         {DType::float32, ReduceOp::premul_sum, 0.3},
    {DType::complex64, ReduceOp::sum, 1},     {DType::boolean, ReduceOp::bxor, 1},
    {DType::float8_e4m3fn, ReduceOp::sum, 1}, {DType::float64, ReduceOp::max, 1},
};

Bytes expected(const Topology& topology, const Reduction& reduction, std::size_t count,
               std::size_t salt = 0) {
  std::vector<Bytes> all;
  std::vector<const void*> sources;
  for (std::size_t r = 0; r < topology.machine_of.size(); ++r) {
    all.push_back(numbers(reduction.dtype, count, static_cast<int>(r), salt));
    sources.push_back(all.back().data());
  }
  Bytes result(count * size_of(reduction.dtype));
  reduce_by_machine(topology, result.data(), sources.data(), count, reduction);
  return result;
}

void check_reductions(WorldRank& me, std::size_t count) {
  int root = 0;
  for (const Case& each : kCases) {
    const Reduction reduction{each.dtype, each.op, each.factor};
    const Bytes wanted = expected(me.topology(), reduction, count);
    Bytes data = numbers(each.dtype, count, me.rank());
    Request request = request_for(Opcode::all_reduce, reduction);
    request.data = data.data();
    request.count = count;
    me.run(request);
    CHECK(same(data, wanted));

    root = (root + 1) % me.size();
    const Bytes mine = numbers(each.dtype, count, me.rank());
    data = mine;
    request = request_for(Opcode::reduce, reduction, root);
    request.data = data.data();
    request.count = count;
    me.run(request);
    CHECK(same(data, me.rank() == root ? wanted : mine));

    // The part of rank r is longer by r elements, and the last is empty.
    const auto length = [&](int r) {
      return r == me.size() - 1 && me.size() > 2 ? 0 : count + static_cast<std::size_t>(r);
    };
    std::vector<Bytes> inputs;
    request = request_for(Opcode::reduce_scatter, reduction);
    for (int r = 0; r < me.size(); ++r) {
      inputs.push_back(numbers(each.dtype, length(r), me.rank(), static_cast<std::size_t>(r)));
      request.inputs.push_back({inputs.back().data(), inputs.back().size()});
    }
    Bytes output(length(me.rank()) * size_of(each.dtype));
    request.data = output.data();
    request.count = length(me.rank());
    me.run(request);
    CHECK(same(output,
               expected(me.topology(), reduction, length(me.rank()), static_cast<std::size_t>(me.rank()))));
  }
}

void check_movements(WorldRank& me, std::size_t count) {
  const auto ranks = static_cast<std::size_t>(me.size());
  const auto index = static_cast<std::size_t>(me.rank());
  for (int root = 0; root < me.size(); ++root) {
    Bytes data = numbers(DType::uint8, count, me.rank());
    Request request = request_for(Opcode::broadcast, kMoved, root);
    request.data = data.data();
    request.count = count;
    me.run(request);
    CHECK(same(data, numbers(DType::uint8, count, root)));

    const Bytes mine = numbers(DType::uint8, count, me.rank());
    std::vector<Bytes> all(ranks, Bytes(count));
    request = request_for(Opcode::gather, kMoved, root);
    for (std::size_t r = 0; r < ranks && me.rank() == root; ++r)
      request.outputs.push_back({all[r].data(), count});
    request.input = mine.data();
    request.count = count;
    me.run(request);
    for (int r = 0; r < me.size() && me.rank() == root; ++r) {
      CHECK(same(all[static_cast<std::size_t>(r)], numbers(DType::uint8, count, r)));
    }

    request = request_for(Opcode::scatter, kMoved, root);
    for (std::size_t r = 0; r < ranks && me.rank() == root; ++r) {
      all[r] = numbers(DType::uint8, count, root, r);
      request.inputs.push_back({all[r].data(), count});
    }
    request.data = data.data();
    request.count = count;
    me.run(request);
    CHECK(same(data, numbers(DType::uint8, count, root, index)));
  }

  std::vector<Bytes> outputs;
  Request request = request_for(Opcode::all_gather, kMoved);
  for (std::size_t r = 0; r < ranks; ++r) outputs.emplace_back(count + r * 777);
  for (Bytes& output : outputs) request.outputs.push_back({output.data(), output.size()});
  const Bytes mine = numbers(DType::uint8, outputs[index].size(), me.rank());
  request.input = mine.data();
  request.count = mine.size();
  me.run(request);
  for (int r = 0; r < me.size(); ++r) {
    const Bytes& output = outputs[static_cast<std::size_t>(r)];
    CHECK(same(output, numbers(DType::uint8, output.size(), r)));
  }

  // Some ranks send little in all, others nothing to some.
  const auto length = [&](int from, int to) {
    return from == 1              ? static_cast<std::size_t>(to)
           : (from + to) % 4 == 3 ? 0
                                  : count + static_cast<std::size_t>(to);
  };
  std::vector<Bytes> inputs;
  outputs.clear();
  request = request_for(Opcode::all_to_all, kMoved);
  for (int r = 0; r < me.size(); ++r) {
    inputs.push_back(numbers(DType::uint8, length(me.rank(), r), me.rank(), static_cast<std::size_t>(r)));
    outputs.emplace_back(length(r, me.rank()));
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    request.inputs.push_back({inputs[r].data(), inputs[r].size()});
    request.outputs.push_back({outputs[r].data(), outputs[r].size()});
  }
  me.run(request);
  for (int r = 0; r < me.size(); ++r) {
    const Bytes& output = outputs[static_cast<std::size_t>(r)];
    CHECK(same(output, numbers(DType::uint8, output.size(), r, index)));
  }
}

// All notice before anything is written, and the next operation finds everything in its place.
void check_mismatch(WorldRank& me, std::size_t count) {
  const Reduction sum{DType::float32, ReduceOp::sum, 1};
  for (int other = 0; other < me.size(); ++other) {
    const bool differs = me.rank() == other;
    // Every second one has another length, the rest does another thing.
    const std::size_t mine = count + static_cast<std::size_t>(differs && other % 2 == 1);
    Bytes data = numbers(DType::float32, mine, me.rank());
    Request request = request_for(differs && other % 2 == 0 ? Opcode::broadcast : Opcode::all_reduce, sum);
    request.data = data.data();
    request.count = mine;
    CHECK(error_of([&] { me.run(request); }).kind() == ErrorKind::mismatch);
    CHECK(same(data, numbers(DType::float32, mine, me.rank())));
    request = request_for(Opcode::all_reduce, sum);
    request.data = data.data();
    request.count = count;
    me.run(request);
    data.resize(count * sizeof(float));
    CHECK(same(data, expected(me.topology(), sum, count)));
  }
}

void test_topology(const Machines& machines, const char* sockets) {
  ::setenv("COLLECTIVES_HOST_STREAMS", sockets, 1);
  World world(machines);
  ::unsetenv("COLLECTIVES_HOST_STREAMS");
  world.on_all([&](int rank) {
    WorldRank me(world, rank);
    for (const std::size_t count : {1, 4097, 13'000, 70'001}) {
      check_reductions(me, count);
      check_movements(me, count);
      check_mismatch(me, count);
    }
    check_movements(me, 3'000'000);
    const Reduction sum{DType::float32, ReduceOp::sum, 1};
    constexpr std::size_t kLong = 2'000'003;  // more chunks than lie between the phases
    Bytes data = numbers(DType::float32, kLong, rank);
    Request request = request_for(Opcode::all_reduce, sum);
    request.data = data.data();
    request.count = kLong;
    me.run(request);
    CHECK(same(data, expected(me.topology(), sum, kLong)));
    me.group().shutdown(true);
  });
}

// `ranks` dealt to `count` machines, which is no multiple of 5; neighbours are on different ones.
Machines many(int count, int ranks) {
  Machines machines(static_cast<std::size_t>(count));
  for (int r = 0; r < ranks; ++r) machines[static_cast<std::size_t>((r * 5 + 2) % count)].push_back(r);
  return machines;
}

// So many machines that leaders pass on what they hear of each other.
void test_many(const Machines& machines) {
  World world(machines);
  world.on_all([&](int rank) {
    WorldRank me(world, rank);
    for (const std::size_t count : {1, 900, 5000}) {
      check_reductions(me, count);
      check_movements(me, count);
    }
    // All hear of a rank that issues something else, also with another root, and can go on.
    const int odd = me.size() / 2;
    for (const Opcode opcode : {Opcode::all_reduce, Opcode::reduce}) {
      Bytes data = numbers(DType::float32, 50, rank);
      const Bytes before = data;
      Request request = request_for(opcode, {DType::float32, ReduceOp::sum, 1});
      request.data = data.data();
      request.count = 50;
      if (rank == odd && opcode == Opcode::all_reduce) request.count = 49;
      if (rank == odd && opcode == Opcode::reduce) request.root = odd;
      ErrorKind error = ErrorKind::backend;
      try {
        me.run(request);
      } catch (const Error& caught) {
        error = caught.kind();
      }
      CHECK(error == ErrorKind::mismatch);
      CHECK(same(data, before));
      check_reductions(me, 3);
    }
    me.group().shutdown(true);
  });
}

// Everybody names the rank that does not come, whoever they wait for themselves.
void test_late(const Machines& machines, int late) {
  World world(machines);
  world.on_all([&](int rank) {
    Group& group = world.group(rank);
    Request request = request_for(Opcode::barrier, kMoved);
    group.run(request, kLimit, nullptr);
    if (rank == late) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    } else {
      ErrorKind kind = ErrorKind::backend;
      int named = -1;
      try {
        group.run(request, 2 * kSecond, nullptr);
      } catch (const Error& error) {
        kind = error.kind();
        named = error.rank();
      }
      CHECK(kind == ErrorKind::timeout);
      CHECK(named == late);
    }
    group.shutdown(false);
  });
}

void test_messages(const Machines& machines) {
  World world(machines);
  world.on_all([&](int rank) {
    Group& group = world.group(rank);
    const int size = group.size();
    const auto exchange = [&](std::uint32_t tag) {
      std::minstd_rand random(tag);  // the same lengths on every rank
      for (int round = 0; round < 20; ++round) {
        const std::size_t count = random() % (round % 5 == 0 ? 1'500'000 : 3000);
        const Bytes sent = numbers(DType::uint8, count, rank, static_cast<std::size_t>(round));
        std::vector<Bytes> received(static_cast<std::size_t>(size), Bytes(count));
        std::vector<std::shared_ptr<Transfer>> transfers;
        const auto envelope = [&](int peer) { return Envelope{peer, tag, DType::uint8, count}; };
        for (int p = 0; p < size; ++p) transfers.push_back(group.send(envelope(p), sent.data(), kLimit));
        for (int p = size - 1; p >= 0; --p) {
          Bytes& place = received[static_cast<std::size_t>(p)];
          transfers.push_back(group.receive(envelope(p), place.data(), kLimit));
        }
        for (const auto& transfer : transfers) {
          CHECK(transfer->wait(kNever, nullptr));
          if (transfer->error() != nullptr) throw *transfer->error();
        }
        for (int p = 0; p < size; ++p) {
          CHECK(same(received[static_cast<std::size_t>(p)],
                     numbers(DType::uint8, count, p, static_cast<std::size_t>(round))));
        }
      }
    };
    const auto guarded = [&](std::uint32_t tag) {
      try {
        exchange(tag);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d, tag %u: %s\n", rank, tag, error.what());
        std::abort();
      }
    };
    std::thread first(guarded, 1);
    std::thread second(guarded, 2);
    WorldRank me(world, rank);
    for (int i = 0; i < 3; ++i) check_reductions(me, 3000);
    first.join();
    second.join();
    group.shutdown(true);
  });
}

// An abort in the middle of long transfers releases everyone.
void test_abort(const Machines& machines) {
  World world(machines);
  world.on_all([&](int rank) {
    Group& group = world.group(rank);
    Bytes data(64 << 20);
    Request request = request_for(Opcode::all_reduce, {DType::float32, ReduceOp::sum, 1});
    request.data = data.data();
    request.count = data.size() / 4;
    std::thread aborter;
    if (rank == 1) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        group.fail({ErrorKind::aborted, "enough", {.rank = 1}});
      });
    }
    ErrorKind kind = ErrorKind::backend;
    try {
      for (;;) group.run(request, kLimit, nullptr);
    } catch (const Error& error) {
      kind = error.kind();
    }
    CHECK(kind == ErrorKind::aborted);
    if (rank == 1) aborter.join();
    group.shutdown(false);
  });
}

// With one rank a machine the order of reduction is that of the ranks; partials add up machine by machine.
void test_order() {
  const float values[] = {1e8F, 1.0F, -1e8F, 1.0F};
  const void* sources[] = {&values[0], &values[1], &values[2], &values[3]};
  const Reduction sum{DType::float32, ReduceOp::sum, 1};
  float result = 0;
  reduce_by_machine(make_topology({{0}, {1}, {2}, {3}}, {}, 0), &result, sources, 1, sum);
  CHECK(result == ((1e8F + 1.0F) + -1e8F) + 1.0F);
  reduce_by_machine(make_topology({{0, 2}, {1, 3}}, {}, 0), &result, sources, 1, sum);
  CHECK(result == 2.0F);
  reduce_by_machine(make_topology({{0, 1}, {2, 3}}, {}, 0), &result, sources, 1, sum);
  CHECK(result == (1e8F + 1.0F) + (-1e8F + 1.0F));
}

}  // namespace

Tests collectives_between_machines_tests() {
  return {
      {"order between machines", test_order},
      {"2 machines, 1 rank each", [] { test_topology({{0}, {1}}, ""); }},
      {"3 machines, 1 rank each, 3 sockets", [] { test_topology({{0}, {1}, {2}}, "3"); }},
      {"2 machines, 2 ranks each", [] { test_topology({{0, 1}, {2, 3}}, "1"); }},
      {"machines of 2 and 3 ranks", [] { test_topology({{0, 2}, {1, 3, 4}}, ""); }},
      {"machines of 1, 2 and 3 ranks, 2 sockets", [] { test_topology({{0, 4}, {1}, {2, 3, 5}}, "2"); }},
      {"33 machines, 1 rank each", [] { test_many(many(33, 33)); }},
      {"41 machines, some with 2 ranks", [] { test_many(many(41, 44)); }},
      {"a late rank among 36 machines", [] { test_late(many(36, 38), 17); }},
      {"messages between machines", [] { test_messages({{0, 1}, {2}}); }},
      {"abort between machines", [] { test_abort({{0, 1}, {2}}); }},
  };
}

}  // namespace collectives
