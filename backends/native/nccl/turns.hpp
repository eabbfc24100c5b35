// Turns of the threads that call NCCL for one device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace collectives {

// Lets one thread at a time issue operations on the communicators of a device, as NCCL asks.
//
// A call that makes connections stays in NCCL until the other ranks have made it, too. There another thread
// may be in the same position, which came first: all would wait for ever. So a thread goes past those that
// have been in NCCL for longer than the patience, if they use other communicators. A thread may take a turn
// within one of its own.
class NcclTurns {
 public:
  using Clock = std::chrono::steady_clock;
  // Communicators by what stands for them, which is compared only.
  using Communicators = std::vector<const void*>;

  explicit NcclTurns(Clock::duration patience) : patience_(patience) {}

  // Begins a turn, or waits at most so long for it; its number, or nothing where it has not come.
  std::optional<std::uint64_t> begin(const Communicators& communicators, Clock::duration at_most);
  void end(std::uint64_t number);

 private:
  struct Turn {
    std::thread::id thread;
    Communicators communicators;
    Clock::time_point since;
  };

  // When the threads inside may be passed; nothing where one must leave before.
  std::optional<Clock::time_point> passable_at(const Communicators& communicators) const;

  const Clock::duration patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Turn> inside_;
  std::uint64_t next_ = 0;
  int waiting_ = 0;
};

}  // namespace collectives
