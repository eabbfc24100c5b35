// Background threads that no signal reaches and that a forked child does not try to join; what a thread is
// at.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace collectives {

// Counts the forks between the start of the program and this process.
unsigned fork_generation() noexcept;

// How often a thread of this process that sleeps now has left its core. Nothing where it does not sleep, or
// the system does not tell.
std::optional<std::uint64_t> sleeps_of_thread(pid_t thread) noexcept;

// Owns an object with threads. A forked child inherits it in whatever state those were, without them: there
// it is neither used nor destroyed, for even the destructor of a condition variable would wait for them.
template <class Object>
class ForkAware {
 public:
  explicit ForkAware(std::unique_ptr<Object> object)
      : object_(std::move(object)), generation_(fork_generation()) {}
  ForkAware(const ForkAware&) = delete;
  ForkAware& operator=(const ForkAware&) = delete;
  ~ForkAware() {
    if (inherited()) static_cast<void>(object_.release());
  }

  bool inherited() const noexcept { return generation_ != fork_generation(); }
  Object* operator->() const noexcept { return object_.get(); }

 private:
  std::unique_ptr<Object> object_;
  const unsigned generation_;
};

class BackgroundThread {
 public:
  BackgroundThread() = default;
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
  ~BackgroundThread() { join(); }

  bool started() const noexcept { return thread_ != nullptr; }
  // `name` (at most 15 characters) is what tools show. Throws ErrorKind::resources.
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
