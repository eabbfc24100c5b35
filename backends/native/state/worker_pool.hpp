// Threads that take parts of a job beside the thread that has it.
//
// A process has one pool for all its groups. Its threads start when a job first needs them, sleep between
// jobs, and end with the last group. A job is a number of parts that nobody orders: whoever is free takes
// one, the thread that has the job among them. So a worker that comes late holds nobody up, and a job is done
// even where no worker comes at all.
//
// Thread safety: `run` may be called from any thread. The pool has one job at a time; a thread that finds it
// taken, by another group, does its own job alone.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/thread.hpp"
#include "state/control_page.hpp"

namespace collectives {

class WorkerPool {
 public:
  // The most parts that a job may have, and the most threads that take part in one.
  static constexpr unsigned kMostParts = 32;

  // The pool of this process, which lives as long as somebody holds it. A forked child gets one of its own.
  static std::shared_ptr<WorkerPool> of_process();

  WorkerPool();
  // Waits for the workers to end; nobody may use the pool any more.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls `body(part)` once for each part, on this thread and as many workers as there are other parts, and
  // returns when all calls have. They may run at the same time and must not throw. What was written before is
  // visible to them, and what they write is visible afterwards. `lingers`: each of the threads has a core, so
  // that a worker may look for the next job for a moment before it sleeps.
  template <class Body>
  void run(unsigned parts, bool lingers, Body& body) {
    run(parts, lingers, [](void* context, unsigned part) { (*static_cast<Body*>(context))(part); }, &body);
  }

  // Threads that have been started, for tests.
  std::size_t workers() const noexcept { return started_.load(std::memory_order_relaxed); }

 private:
  using Function = void (*)(void* context, unsigned part);

  void run(unsigned parts, bool lingers, Function function, void* context);
  void start_workers(unsigned wanted);
  void serve(std::uint32_t seen, unsigned index) noexcept;
  bool await_job(std::uint32_t seen) noexcept;
  void take_parts(std::uint32_t job, unsigned wanted) noexcept;
  std::optional<unsigned> take(std::uint32_t job, unsigned wanted) noexcept;
  std::uint32_t current() const noexcept {
    return static_cast<std::uint32_t>(state_.load(std::memory_order_acquire) >> 32);
  }

  const unsigned generation_ = fork_generation();
  std::atomic<bool> busy_{false};  // acquire and release of everything that belongs to whoever has the job
  std::uint32_t job_ = 0;          // the number of the last job
  std::vector<std::unique_ptr<BackgroundThread>> threads_;
  bool refused_ = false;  // the system gives no more threads
  std::atomic<std::size_t> started_{0};

  // The job. Whoever has taken a part of it may read these: they change only once all parts are done.
  Function function_ = nullptr;
  void* context_ = nullptr;

  // The job's number in the upper half; in the lower half a bit for each part that nobody has taken. Both
  // change as one, so that a worker that comes late takes nothing of a later job by mistake.
  alignas(kLine) std::atomic<std::uint64_t> state_{0};
  std::atomic<bool> lingers_{false};  // relaxed: a hint
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<std::uint32_t> signal_{0};  // changes where a sleeping worker is to look again

  alignas(kLine) std::atomic<std::uint32_t> unfinished_{0};  // parts that are not done
  std::atomic<bool> caller_sleeps_{false};
};

}  // namespace collectives
