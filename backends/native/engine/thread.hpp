// A background thread that no signal reaches and that a forked child does not try to join.
#pragma once

#include <functional>
#include <thread>

namespace collectives {

// Counts the forks between the start of the program and this process.
unsigned fork_generation() noexcept;

class BackgroundThread {
 public:
  BackgroundThread() = default;
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
  ~BackgroundThread() { join(); }

  bool started() const noexcept { return thread_ != nullptr; }
  // `name` (at most 15 characters) is what tools show.
  void start(const char* name, std::function<void()> body);
  // Waits for the body to return. In a forked child, where the thread does not exist, forgets it.
  void join() noexcept;
  // Gives up waiting for it: whatever it uses must stay.
  void abandon() noexcept;

 private:
  std::thread* thread_ = nullptr;
  unsigned generation_ = 0;
};

}  // namespace collectives
