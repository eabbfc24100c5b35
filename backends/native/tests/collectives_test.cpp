// Every collective against formulas, on one machine and, for short ones, between machines.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <thread>
#include <vector>

#include "tests/ranks.hpp"

namespace collectives {
namespace {

void check_movements(Rank& me, std::size_t count, int root) {
  auto values = values_of(me.rank(), count);
  Request request = request_for(Opcode::broadcast, root);
  request.data = bytes_of(values);
  request.count = count;
  me.run(request);
  CHECK(values == values_of(root, count));

  std::vector<std::vector<std::int32_t>> outputs;
  for (std::size_t r = 0; r < me.ranks(); ++r) outputs.emplace_back(count + 3 * r);
  values = values_of(me.rank(), count + 3 * static_cast<std::size_t>(me.rank()));
  request = request_for(Opcode::all_gather);
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
  request = request_for(Opcode::gather, root);
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
  request = request_for(Opcode::scatter, root);
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
  Request request = request_for(Opcode::all_to_all);
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
      me.run(request_for(Opcode::barrier));
      check_reductions(me, count, root);
      check_movements(me, count, root);
      check_all_to_all(me, count);
    }
    groups[static_cast<std::size_t>(r)]->shutdown(true);
  });
}

// Sizes around every threshold in random order, so that regions of successive operations meet in every way
// and wrap; with failed operations between them, which must leave all ranks' regions in step.
void test_regions(Groups groups) {
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
        Request request = request_for(round % 8 == 0 || r != 0 ? Opcode::all_reduce : Opcode::broadcast);
        request.data = bytes_of(values);
        request.count = values.size();
        CHECK(error_of([&] { me.run(request); }).kind() == ErrorKind::mismatch);
      }
      check_all_to_all(me, count / 3);
    }
    groups[static_cast<std::size_t>(r)]->shutdown(true);
  });
}

// A rank that stages what it sends, and fills no chunk, may be in the next operation while others still read
// the staged part: operations whose rings wrap must leave it alone.
void test_staged_beside_chunks(Groups groups) {
  constexpr std::size_t kStaged = 4096;
  constexpr std::size_t kLong = 131'072;
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Rank me(*groups[static_cast<std::size_t>(r)]);
    const auto length = [](int from, int to) {
      return to != 1 ? 0 : from == 0 ? kStaged : from == 2 ? kLong : 0;
    };
    for (int round = 0; round < 40; ++round) {
      std::vector<std::vector<std::int32_t>> inputs;
      std::vector<std::vector<std::int32_t>> outputs;
      Request request = request_for(Opcode::all_to_all);
      for (int other = 0; other < me.size(); ++other) {
        inputs.push_back(values_of(r, length(r, other), round));
        outputs.emplace_back(length(other, r));
      }
      for (auto& part : inputs) request.inputs.push_back({bytes_of(part), part.size() * 4});
      for (auto& part : outputs) request.outputs.push_back({bytes_of(part), part.size() * 4});
      // The others sleep meanwhile, and then wake later than this one issues its next.
      if (r == 0 && round % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      me.run(request);
      for (int other = 0; other < me.size(); ++other) {
        CHECK(outputs[static_cast<std::size_t>(other)] == values_of(other, length(other, r), round));
      }
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
      me.run(request_for(Opcode::barrier));
      check_reductions(me, count, i % me.size());
      check_movements(me, count, i % me.size());
      check_all_to_all(me, count);
    }
    groups[static_cast<std::size_t>(r)]->shutdown(true);
  });
}

// Two groups of the same ranks, each on a thread of its own: both want the pool.
void test_groups_at_once() {
  const std::shared_ptr<Groups> groups[] = {std::make_shared<Groups>(shared_ranks(2, 4)),
                                            std::make_shared<Groups>(shared_ranks(2, 8)),
                                            std::make_shared<Groups>(shared_ranks(2))};
  on_all(6, [&](int number) {
    Group& group = *(*groups[number / 2])[static_cast<std::size_t>(number % 2)];
    Rank me(group);
    for (int round = 0; round < 6; ++round)
      check_reductions(me, 200'000 + static_cast<std::size_t>(round), 0);
    group.shutdown(true);
  });
}

void test_mismatch(Groups groups) {
  on_all(static_cast<int>(groups.size()), [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    for (int round = 0; round < 50; ++round) {
      std::vector<std::int32_t> values(r == 1 ? 100'000 : 10, r);
      Request request = request_for(round % 2 == 0 && r == 0 ? Opcode::broadcast : Opcode::all_reduce);
      request.data = bytes_of(values);
      request.count = values.size();
      const Error error = error_of([&] { group.run(request, kLimit, nullptr); });
      CHECK(error.kind() == ErrorKind::mismatch);
      CHECK(values == std::vector<std::int32_t>(values.size(), r));
    }
    group.shutdown(true);
  });
}

}  // namespace

Tests collectives_tests() {
  return {
      {"collectives, 1 rank", [] { test_collectives(shared_ranks(1)); }},
      {"collectives, 2 ranks", [] { test_collectives(shared_ranks(2)); }},
      {"collectives, 3 ranks", [] { test_collectives(shared_ranks(3)); }},
      {"collectives, 5 attached ranks", [] { test_collectives(attached_ranks(5)); }},
      {"regions, 2 ranks", [] { test_regions(shared_ranks(2)); }},
      {"regions, 3 attached ranks", [] { test_regions(attached_ranks(3)); }},
      {"staged parts beside chunks", [] { test_staged_beside_chunks(shared_ranks(4, 2)); }},
      {"collectives, 1 rank of 2 threads", [] { test_collectives(shared_ranks(1, 2)); }},
      {"collectives, 2 ranks of 2 threads", [] { test_collectives(shared_ranks(2, 2)); }},
      {"collectives, 2 ranks of 8 threads", [] { test_collectives(shared_ranks(2, 8)); }},
      {"collectives, 3 ranks of 4 threads", [] { test_collectives(shared_ranks(3, 4)); }},
      {"regions, 3 ranks of 3 threads", [] { test_regions(shared_ranks(3, 3)); }},
      {"collectives, 2 machines, 3 threads",
       [] { test_collectives(machine_ranks({{0, 1}, {2}}, true, nullptr, 3)); }},
      {"collectives, 2 machines of 1, 4 threads",
       [] { test_collectives(machine_ranks({{0}, {1}}, true, nullptr, 4)); }},
      {"groups of 1 and 4 threads at once", test_groups_at_once},
      {"mismatch", [] { test_mismatch(shared_ranks(3)); }},
      {"short collectives, 2 machines of 2", [] { test_short_collectives(machine_ranks({{0, 1}, {2, 3}})); }},
      {"short collectives, 3 machines", [] { test_short_collectives(machine_ranks({{0, 2}, {1}, {3}})); }},
      {"mismatch between machines", [] { test_mismatch(machine_ranks({{0, 1}, {2, 3}})); }},
  };
}

}  // namespace collectives
