// Which completions begin when, on threads of which some do not come back.
#include "engine/completions.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/testing.hpp"

namespace collectives {
namespace {

constexpr std::uint64_t kGroup = 1;
constexpr std::uint64_t kOtherGroup = 2;

// Threads that carry out completions, as Python's do.
class Completing {
 public:
  explicit Completing(int threads) {
    for (int n = 0; n < threads; ++n) {
      threads_.emplace_back([this] {
        while (const auto taken = completions_.pop()) body_of(taken->number)();
      });
    }
  }
  ~Completing() {
    completions_.close();
    for (std::thread& thread : threads_) thread.join();
  }

  Completions* operator->() { return &completions_; }
  void expect(std::uint64_t number, std::function<void()> body, std::uint64_t group = kGroup,
              bool collective = true) {
    {
      const std::lock_guard lock(mutex_);
      bodies_[number] = std::move(body);
    }
    completions_.expect(number, group, collective);
  }

 private:
  std::function<void()> body_of(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    return bodies_.at(number);
  }

  Completions completions_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::function<void()>> bodies_;
  std::vector<std::thread> threads_;
};

void test_order_of_issue() {
  std::vector<int> seen;
  {
    Completing completing(3);
    for (const int number : {4, 2, 3, 1, 5}) {
      completing.expect(static_cast<std::uint64_t>(number), [&seen, number] { seen.push_back(number); });
    }
    completing.expect(9, [&seen] { seen.push_back(9); }, kGroup, false);  // a message waits for none
    for (const std::uint64_t number : {3, 9, 4, 2}) completing->push(number);
    completing->push(3);  // told twice
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    completing->forget(1);
    completing->push(5);
  }
  CHECK((seen == std::vector<int>{9, 2, 3, 4, 5}));
}

void test_waits_within() {
  Completing completing(4);
  std::promise<void> other;
  std::promise<void> deeper;
  std::promise<void> last;
  completing.expect(1, [&] {
    completing.expect(3, [&] { deeper.set_value(); });
    completing->push(3);
    deeper.get_future().wait();
    other.get_future().wait();
    last.set_value();
  });
  completing.expect(2, [&] { other.set_value(); }, kOtherGroup);
  completing->push(1);
  completing->push(2);
  last.get_future().wait();
}

// The next begins though one sleeps, and not while that waits for a collective of its own.
void test_sleeps() {
  Completing completing(3);
  std::promise<void> next;
  std::promise<void> slept;
  completing.expect(1, [&] {
    next.get_future().wait();
    slept.set_value();
  });
  completing.expect(2, [&] { next.set_value(); });
  completing->push(1);
  completing->push(2);
  slept.get_future().wait();

  std::atomic<bool> over{false};  // acquire and release: for nothing else
  std::promise<void> begun;
  std::promise<void> after;
  std::promise<void> own;
  completing.expect(3, [&] {
    completing.expect(5, [&] { own.set_value(); });
    begun.set_value();
    own.get_future().wait();
    over.store(true, std::memory_order_release);
  });
  completing.expect(4, [&] {
    CHECK(over.load(std::memory_order_acquire));
    after.set_value();
  });
  completing->push(3);
  completing->push(4);
  begun.get_future().wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  completing->push(5);
  after.get_future().wait();
}

}  // namespace

Tests completions_tests() {
  return {{"completions come in the order of issue", test_order_of_issue},
          {"completions wait for deeper ones and those of other groups", test_waits_within},
          {"a completion that sleeps lets the next begin", test_sleeps}};
}

}  // namespace collectives
