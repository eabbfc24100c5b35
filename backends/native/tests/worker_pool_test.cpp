// The pool of threads that take parts of a job.
#include "state/worker_pool.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/testing.hpp"

namespace collectives {
namespace {

// Each part once, and what it writes is there afterwards.
void check_jobs(WorkerPool& pool, bool lingers, int jobs) {
  std::array<int, WorkerPool::kMostParts> done{};
  for (int job = 0; job < jobs; ++job) {
    const unsigned parts = 1 + static_cast<unsigned>(job) % WorkerPool::kMostParts;
    done.fill(0);
    auto body = [&](unsigned part) { done[part] += job + 1; };
    pool.run(parts, lingers, body);
    for (unsigned part = 0; part < done.size(); ++part) CHECK(done[part] == (part < parts ? job + 1 : 0));
  }
}

void test_jobs() {
  const std::shared_ptr<WorkerPool> pool = WorkerPool::of_process();
  CHECK(pool->workers() == 0);  // none before a job needs them
  auto nothing = [](unsigned) {};
  pool->run(1, true, nothing);
  CHECK(pool->workers() == 0);
  pool->run(3, true, nothing);
  CHECK(pool->workers() == 2);
  for (const bool lingers : {true, false}) check_jobs(*pool, lingers, 300);
  CHECK(pool->workers() == WorkerPool::kMostParts - 1);
}

// Workers take part: a job whose parts wait for each other comes to its end.
void test_parts_at_once() {
  WorkerPool pool;
  for (int job = 0; job < 20; ++job) {
    std::atomic<int> here{0};
    auto body = [&](unsigned) {
      here.fetch_add(1);
      while (here.load() < 4) std::this_thread::yield();
    };
    pool.run(4, job % 2 == 0, body);
  }
}

void test_callers_at_once() {
  const std::shared_ptr<WorkerPool> pool = WorkerPool::of_process();
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back([&] { check_jobs(*pool, false, 200); });
  for (std::thread& caller : callers) caller.join();
}

void test_one_pool() {
  std::shared_ptr<WorkerPool> pool = WorkerPool::of_process();
  CHECK(pool == WorkerPool::of_process());
  check_jobs(*pool, false, 8);
  pool.reset();  // its threads end
  CHECK(WorkerPool::of_process()->workers() == 0);
}

// A child has a pool of its own, and may drop its parent's.
void test_fork() {
  std::shared_ptr<WorkerPool> pool = WorkerPool::of_process();
  check_jobs(*pool, true, 8);
  const pid_t child = ::fork();
  if (child == 0) {
    std::shared_ptr<WorkerPool> own = WorkerPool::of_process();
    CHECK(own != pool && own->workers() == 0);
    pool.reset();
    // A sanitizer that watches threads has none in a child of a process with several.
#if !defined(__SANITIZE_THREAD__)
    check_jobs(*own, true, 8);
    own.reset();
#endif
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  check_jobs(*pool, true, 8);
}

}  // namespace

Tests worker_pool_tests() {
  return {
      {"worker pool", test_jobs},
      {"worker pool, parts at once", test_parts_at_once},
      {"worker pool, callers at once", test_callers_at_once},
      {"worker pool, one for a process", test_one_pool},
      {"worker pool after a fork", test_fork},
  };
}

}  // namespace collectives
