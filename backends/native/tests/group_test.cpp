// How groups end: aborts, timeouts, departures; and many groups one after the other.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks.hpp"

namespace collectives {
namespace {

void test_abort(Groups groups) {
  const int size = static_cast<int>(groups.size());
  on_all(size, [&](int r) {
    Group& group = *groups[static_cast<std::size_t>(r)];
    std::vector<std::int32_t> values(10);
    Request request = request_for(Opcode::all_reduce);
    request.data = bytes_of(values);
    request.count = values.size();
    std::thread aborter;
    if (r == 0) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        group.fail({ErrorKind::aborted, "enough", {.rank = 0}});
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
    const Error error = error_of([&] { group.run(request_for(Opcode::barrier), kLimit, nullptr); });
    CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == size - 1);
  });
}

// A rank passes on what broke another group: all read it as their own, with all details.
void test_failure_of_another_group(Groups groups) {
  const Error limit(ErrorKind::timeout, "all_reduce was not done",
                    {.rank = 2, .missing = {2}, .operation = "all_reduce", .sequence = 7});
  CHECK(!groups[0]->failure());
  std::thread waiting([&] {
    const Error error = error_of([&] { groups[1]->run(request_for(Opcode::barrier), kLimit, nullptr); });
    CHECK(error.kind() == ErrorKind::timeout && error.rank() == 2);
    CHECK(error.details().missing == std::vector{2} && error.details().operation == "all_reduce");
    CHECK(error.details().sequence == 7);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  groups[0]->fail(limit);
  groups[2]->fail({ErrorKind::aborted, "too late", {.rank = 2}});
  waiting.join();
  for (const auto& group : groups) {
    const auto failure = group->failure();
    CHECK(failure && failure->text == "all_reduce was not done");
    const Error error = error_of([&] { group->run(request_for(Opcode::barrier), kLimit, nullptr); });
    CHECK(error.kind() == ErrorKind::aborted && error.details().cause->kind() == ErrorKind::timeout);
  }
}

// What an error says of the exception of a rank's program outlives the record.
void test_failures_and_errors() {
  const auto program = std::make_shared<const Error>(ErrorKind::program, "KeyError: 'x'");
  const Error aborted(ErrorKind::aborted, "rank 1 aborted it, after KeyError: 'x'",
                      {.rank = 1, .cause = program});
  const Error again = error_from(failure_from(aborted, 0));
  CHECK(again.kind() == ErrorKind::aborted && again.message() == aborted.message() && again.rank() == 1);
  CHECK(again.details().cause->message() == "KeyError: 'x'");
}

// Another rank that passes its own limit a moment later still says whom the first had waited for.
void test_reports_after_a_timeout(Groups groups) {
  Group& gave_up = *groups[1];
  const Error error =
      error_of([&] { gave_up.run(request_for(Opcode::barrier), 50 * kMillisecond, nullptr); });
  CHECK(error.kind() == ErrorKind::timeout && error.rank() == 0);
  CHECK(groups[0]->report().find("rank 1: in barrier number 1, waits for rank 0, for") != std::string::npos);
}

// Keeps a thread in an operation for a while after its group was shut down.
class SlowInterrupt final : public Interrupt {
 public:
  void blocks() override {}
  std::string site() override { return {}; }
  bool requested() override {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    return false;
  }
};

// A leader leaves, and takes its time to end its connections: to its machine, the ranks elsewhere live on.
void test_leader_that_takes_its_time(Groups groups) {
  std::thread waiting([&] {
    SlowInterrupt slow;
    error_of([&] { groups[1]->run(request_for(Opcode::barrier), kLimit, &slow); });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::thread leaving([&] { groups[1]->shutdown(false); });
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  CHECK(groups[2]->lost_ranks().empty());
  waiting.join();
  leaving.join();
}

void test_many_groups() {
  for (int round = 0; round < 20; ++round) {
    Groups groups = attached_ranks(3);
    on_all(3, [&](int r) { Rank(*groups[static_cast<std::size_t>(r)]).run(request_for(Opcode::barrier)); });
    // Some end in order, some with the object.
    if (round % 2 == 0) on_all(3, [&](int r) { groups[static_cast<std::size_t>(r)]->shutdown(true); });
  }
}

}  // namespace

Tests group_tests() {
  return {
      {"abort between machines", [] { test_abort(machine_ranks({{0}, {1, 2}})); }},
      {"abort", [] { test_abort(shared_ranks(3)); }},
      {"timeout and departure", [] { test_timeout_and_departure(shared_ranks(3)); }},
      {"failure of another group", [] { test_failure_of_another_group(shared_ranks(3)); }},
      {"failures and errors", [] { test_failures_and_errors(); }},
      {"reports after a timeout", [] { test_reports_after_a_timeout(shared_ranks(2)); }},
      {"leader that takes its time", [] { test_leader_that_takes_its_time(machine_ranks({{0}, {1, 2}})); }},
      {"many groups", [] { test_many_groups(); }},
  };
}

}  // namespace collectives
