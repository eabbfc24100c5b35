// Which calls are inside NCCL, so that a communicator does not vanish under one, and whose turn it is to
// call.
//
// NCCL frees a communicator when it is aborted, whoever may be about to use it. So every call announces
// itself, and the end of a communicator first refuses new calls, then gives those on their way a moment to
// return.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace collectives {

// The calls that use one communicator, until it ends. Any thread may use it.
class NcclCalls {
 public:
  enum class End : std::uint8_t { none, destroyed, aborted };
  using Seconds = std::chrono::duration<double>;

  // Announces a call, which `leave` must follow; false where the communicator ends or has ended.
  bool enter();
  void leave();
  // What refuses new calls.
  End end() const noexcept { return end_.load(); }
  // Refuses new calls and waits for those under way but `own` ones, which are this thread's; without
  // `patience` for ever. An abort overtakes a destruction that waits. True where the caller is the one to end
  // the communicator.
  bool close(End end, int own, std::optional<Seconds> patience);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  std::atomic<End> end_ = End::none;  // written with the mutex held; who reads it without goes by it alone
  bool taken_ = false;
};

// The groups of calls that a thread has open, one within the other, and the communicators with operations in
// them. These count as in use until the outermost group is closed: NCCL has noted them.
class NcclOpenGroups {
 public:
  enum class Entry : std::uint8_t { refused, call, noted };

  static NcclOpenGroups& of_this_thread();

  bool any() const noexcept { return depth_ > 0; }
  void opened() noexcept { ++depth_; }
  // Also where closing failed, or there was none to close.
  void closed();
  // Announces a call: of `call` alone, `NcclCalls::leave` must follow.
  Entry enter(const std::shared_ptr<NcclCalls>& calls);
  // How often the groups count the communicator: 0 or 1.
  int noted(const NcclCalls& calls) const;

 private:
  int depth_ = 0;
  std::vector<std::shared_ptr<NcclCalls>> noted_;
};

// Turns of the threads that call NCCL for one device: one at a time issues operations on the communicators of
// the device, as NCCL asks.
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
