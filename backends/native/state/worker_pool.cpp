#include "state/worker_pool.hpp"

#include <mutex>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "memory/futex.hpp"
#include "state/spin_policy.hpp"

namespace collectives {
namespace {

// How long a worker that has just worked looks for the next job: longer than the stages of a pipeline are
// apart, shorter than what a sleeping thread's core would be missed for.
constexpr Nanoseconds kLinger = 50'000;
constexpr int kLooksPerClock = 32;
// How often the caller looks for the last part before it sleeps; a part takes a few microseconds.
constexpr int kLooksForEnd = 2000;
constexpr Nanoseconds kLookAgain = kSecond;

struct ProcessPool {
  std::mutex mutex;
  std::weak_ptr<WorkerPool> pool;
};

// Never destroyed, so that no thread can outlive it.
ProcessPool& process_pool() {
  static ProcessPool* only = new ProcessPool();
  return *only;
}

}  // namespace

std::shared_ptr<WorkerPool> WorkerPool::of_process() {
  ProcessPool& known = process_pool();
  const std::lock_guard lock(known.mutex);
  std::shared_ptr<WorkerPool> pool = known.pool.lock();
  if (pool && pool->generation_ == fork_generation()) return pool;
  pool = std::make_shared<WorkerPool>();
  known.pool = pool;
  return pool;
}

WorkerPool::WorkerPool() = default;

WorkerPool::~WorkerPool() {
  stopping_.store(true, std::memory_order_seq_cst);
  signal_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(signal_, FutexScope::process);
  threads_.clear();  // which joins them
}

void WorkerPool::run(unsigned parts, bool lingers, Function function, void* context) {
  if (parts < 2 || busy_.exchange(true, std::memory_order_acquire)) {
    for (unsigned part = 0; part < parts; ++part) function(context, part);
    return;
  }
  start_workers(parts - 1);
  function_ = function;
  context_ = context;
  lingers_.store(lingers, std::memory_order_relaxed);
  unfinished_.store(parts, std::memory_order_relaxed);
  const std::uint32_t job = ++job_;
  const std::uint64_t all = (std::uint64_t{1} << parts) - 1;
  // Release of the job; and one half of the handshake with workers that go to sleep.
  state_.store(static_cast<std::uint64_t>(job) << 32 | all, std::memory_order_seq_cst);
  const std::uint32_t sleepers = sleepers_.load(std::memory_order_seq_cst);
  const auto awake = static_cast<std::uint32_t>(threads_.size()) - sleepers;
  if (sleepers != 0 && awake < parts - 1) {
    signal_.fetch_add(1, std::memory_order_release);
    futex_wake(signal_, static_cast<int>(parts - 1 - awake), FutexScope::process);
  }
  take_parts(job, 0);
  for (int look = 0; look < kLooksForEnd; ++look) {
    if (unfinished_.load(std::memory_order_acquire) == 0) break;
    relax_processor();
  }
  if (unfinished_.load(std::memory_order_acquire) != 0) {
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    // Sequentially consistent: either this sees the last part done, or who does it sees the sleeper.
    while (const std::uint32_t left = unfinished_.load(std::memory_order_seq_cst)) {
      futex_wait(unfinished_, left, kLookAgain, FutexScope::process);
    }
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }
  busy_.store(false, std::memory_order_release);
}

void WorkerPool::start_workers(unsigned wanted) {
  while (!refused_ && threads_.size() < wanted) {
    auto thread = std::make_unique<BackgroundThread>();
    const auto index = static_cast<unsigned>(threads_.size() + 1);
    try {
      thread->start("collectives-wrk", [this, seen = job_, index] { serve(seen, index); });
    } catch (const Error&) {
      refused_ = true;  // the job is done by those that there are
      return;
    }
    threads_.push_back(std::move(thread));
    started_.store(threads_.size(), std::memory_order_relaxed);
  }
}

void WorkerPool::serve(std::uint32_t seen, unsigned index) noexcept {
  while (await_job(seen)) {
    seen = current();
    take_parts(seen, index);
  }
}

bool WorkerPool::await_job(std::uint32_t seen) noexcept {
  const auto here = [&] { return current() != seen || stopping_.load(std::memory_order_relaxed); };
  if (lingers_.load(std::memory_order_relaxed)) {
    const Nanoseconds end = now_ns() + kLinger;
    do {
      for (int look = 0; look < kLooksPerClock; ++look) {
        if (here()) break;
        relax_processor();
      }
    } while (!here() && now_ns() < end);
  }
  while (!here()) {
    const std::uint32_t signal = signal_.load(std::memory_order_acquire);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    // The other half of the handshake.
    const bool changed =
        state_.load(std::memory_order_seq_cst) >> 32 != seen || stopping_.load(std::memory_order_seq_cst);
    if (!changed) futex_wait(signal_, signal, kLookAgain, FutexScope::process);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return !stopping_.load(std::memory_order_relaxed);
}

// `wanted`: the part to begin with. A thread that takes the same part of every job finds its memory in the
// caches of its core.
void WorkerPool::take_parts(std::uint32_t job, unsigned wanted) noexcept {
  while (const std::optional<unsigned> part = take(job, wanted)) {
    function_(context_, *part);
    // Release of what the part has written.
    if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
        caller_sleeps_.load(std::memory_order_seq_cst)) {
      futex_wake_all(unfinished_, FutexScope::process);
    }
  }
}

std::optional<unsigned> WorkerPool::take(std::uint32_t job, unsigned wanted) noexcept {
  std::uint64_t state = state_.load(std::memory_order_acquire);
  for (;;) {
    const auto left = static_cast<std::uint32_t>(state);
    if (state >> 32 != job || left == 0) return std::nullopt;
    const unsigned part = (left >> wanted & 1U) != 0 ? wanted : static_cast<unsigned>(std::countr_zero(left));
    // Acquire of the job.
    if (state_.compare_exchange_weak(state, state & ~(std::uint64_t{1} << part), std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
      return part;
    }
  }
}

}  // namespace collectives
