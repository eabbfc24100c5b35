#include "common/thread.hpp"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <string>
#include <system_error>
#include <utility>

#include "common/error.hpp"

namespace collectives {
namespace {

std::atomic<unsigned> forks{0};  // written by a child that has one thread, so nothing to order

[[maybe_unused]] const int registered =
    ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

unsigned fork_generation() noexcept { return forks.load(std::memory_order_relaxed); }

void BackgroundThread::start(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = new std::thread(std::move(body));
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(ErrorKind::resources,
                "no thread could be started: " + std::string(error.what()) +
                    "; raise the limit of processes of this user (ulimit -u) or of its container (pids.max)");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_->native_handle(), name);
  generation_ = fork_generation();
}

void BackgroundThread::join() noexcept {
  if (thread_ == nullptr) return;
  std::thread* thread = std::exchange(thread_, nullptr);
  if (generation_ != fork_generation()) return;  // leaked on purpose: there is nothing to join
  thread->join();
  delete thread;
}

void BackgroundThread::abandon() noexcept {
  std::thread* thread = std::exchange(thread_, nullptr);
  if (thread == nullptr || generation_ != fork_generation()) return;
  thread->detach();
  delete thread;
}

}  // namespace collectives
