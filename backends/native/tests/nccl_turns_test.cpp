// How threads that call NCCL for one device wait for each other, and pass those that make connections.
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "nccl/calls.hpp"
#include "tests/testing.hpp"

namespace collectives {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using Communicators = NcclTurns::Communicators;

const int a = 0;
const int b = 0;

// Takes a turn on a thread of its own, which is over.
std::uint64_t begin_elsewhere(NcclTurns& turns, const Communicators& communicators) {
  std::optional<std::uint64_t> turn;
  std::thread([&] { turn = turns.begin(communicators, milliseconds(0)); }).join();
  CHECK(turn.has_value());
  return *turn;
}

void test_one_thread_at_a_time() {
  NcclTurns turns(hours(1));
  const auto other = begin_elsewhere(turns, {&a});
  CHECK(!turns.begin({&b}, milliseconds(0)));
  CHECK(!turns.begin({&b}, milliseconds(5)));
  std::thread ending([&] {
    std::this_thread::sleep_for(milliseconds(5));
    turns.end(other);
  });
  const auto own = turns.begin({&b}, hours(1));  // is woken
  CHECK(own.has_value());
  const auto inner = turns.begin({&a, &b}, milliseconds(0));  // within one of the same thread
  CHECK(inner.has_value() && *inner != *own);
  ending.join();
  turns.end(*inner);
  turns.end(*own);
  turns.end(begin_elsewhere(turns, {&a}));
}

void test_passes_those_that_stay_on_other_communicators() {
  NcclTurns turns(milliseconds(20));
  const auto began = NcclTurns::Clock::now();
  const auto other = begin_elsewhere(turns, {&a});
  const auto own = turns.begin({&b}, hours(1));
  CHECK(own.has_value());
  CHECK(NcclTurns::Clock::now() - began >= milliseconds(20));
  turns.end(*own);
  CHECK(!turns.begin({&b, &a}, milliseconds(30)));  // never past one on the same communicator
  turns.end(other);
}

// Whoever is inside has no other thread beside it.
void test_turns_exclude_each_other() {
  NcclTurns turns(hours(1));
  int inside = 0;              // a data race, were two threads to have a turn at once
  std::atomic<int> taken = 0;  // sequentially consistent; counts only
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 500; ++round) {
        const auto turn = turns.begin({&a}, hours(1));
        CHECK(turn.has_value());
        CHECK(++inside == 1);
        --inside;
        ++taken;
        turns.end(*turn);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(taken.load() == 1500);
}

}  // namespace

Tests nccl_turns_tests() {
  return {
      {"nccl: one thread at a time", [] { test_one_thread_at_a_time(); }},
      {"nccl: turns pass those that stay", [] { test_passes_those_that_stay_on_other_communicators(); }},
      {"nccl: turns exclude each other", [] { test_turns_exclude_each_other(); }},
  };
}

}  // namespace collectives
