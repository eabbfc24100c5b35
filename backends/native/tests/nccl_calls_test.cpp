// How the end of a communicator of NCCL waits for calls that are inside, and refuses new ones.
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "nccl/calls.hpp"
#include "tests/testing.hpp"

namespace collectives {
namespace {

using End = NcclCalls::End;
using Entry = NcclOpenGroups::Entry;
using Seconds = NcclCalls::Seconds;

void await_end_of(const NcclCalls& calls, End end) {
  while (calls.end() != end) std::this_thread::yield();
}

void test_end_waits_for_calls() {
  NcclCalls calls;
  CHECK(calls.enter());
  std::atomic<bool> left = false;  // sequentially consistent: what the other thread did before it left
  std::thread other([&] {
    await_end_of(calls, End::destroyed);
    CHECK(!calls.enter());
    left.store(true);
    calls.leave();
  });
  CHECK(calls.close(End::destroyed, 0, std::nullopt));
  CHECK(left.load());
  other.join();
  CHECK(!calls.close(End::destroyed, 0, std::nullopt));
}

void test_patience_ends() {
  NcclCalls calls;
  CHECK(calls.enter());
  CHECK(calls.close(End::aborted, 0, Seconds(0.01)));
  calls.leave();
}

void test_abort_overtakes_a_destruction() {
  NcclCalls calls;
  CHECK(calls.enter());
  bool destroys = true;
  std::thread other([&] { destroys = calls.close(End::destroyed, 0, std::nullopt); });
  await_end_of(calls, End::destroyed);
  CHECK(calls.close(End::aborted, 0, Seconds(0.01)));
  other.join();
  CHECK(!destroys);
  calls.leave();
}

void test_groups_hold_communicators_until_the_outermost_closes() {
  const auto calls = std::make_shared<NcclCalls>();
  NcclOpenGroups groups;
  CHECK(groups.enter(calls) == Entry::call);
  calls->leave();
  groups.opened();
  groups.opened();
  CHECK(groups.enter(calls) == Entry::noted);
  CHECK(groups.enter(calls) == Entry::noted);
  CHECK(groups.noted(*calls) == 1);
  groups.closed();
  CHECK(groups.noted(*calls) == 1);
  CHECK(calls->close(End::aborted, groups.noted(*calls), std::nullopt));  // one's own does not count
  CHECK(groups.enter(calls) == Entry::refused);
  groups.closed();
  CHECK(groups.noted(*calls) == 0);
  groups.closed();  // without one that is open
  CHECK(!groups.any());
}

// Whoever is inside when the end has been taken would use freed memory.
void test_no_call_is_inside_after_the_end() {
  for (int round = 0; round < 200; ++round) {
    NcclCalls calls;
    std::atomic<bool> ended = false;  // sequentially consistent with the calls' mutex around it
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (calls.enter()) {
          CHECK(!ended.load());
          calls.leave();
        }
      });
    }
    CHECK(calls.close(End::destroyed, 0, std::nullopt));
    ended.store(true);
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace

Tests nccl_calls_tests() {
  return {
      {"nccl: the end waits for calls", [] { test_end_waits_for_calls(); }},
      {"nccl: patience ends", [] { test_patience_ends(); }},
      {"nccl: an abort overtakes a destruction", [] { test_abort_overtakes_a_destruction(); }},
      {"nccl: groups hold communicators",
       [] { test_groups_hold_communicators_until_the_outermost_closes(); }},
      {"nccl: no call is inside after the end", [] { test_no_call_is_inside_after_the_end(); }},
  };
}

}  // namespace collectives
