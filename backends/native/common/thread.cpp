#include "common/thread.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

std::optional<std::uint64_t> sleeps_of_thread(pid_t thread) noexcept {
  char text[4096];
  std::snprintf(text, sizeof(text), "/proc/self/task/%d/status", static_cast<int>(thread));
  const int file = ::open(text, O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  const ssize_t size = ::read(file, text, sizeof(text) - 1);
  ::close(file);
  if (size <= 0) return std::nullopt;
  text[size] = '\0';
  if (std::strstr(text, "\nState:\tS") == nullptr) return std::nullopt;
  std::optional<std::uint64_t> sleeps;
  constexpr const char* kSwitches = "voluntary_ctxt_switches:\t";  // the end of both names
  for (const char* at = text; (at = std::strstr(at, kSwitches)) != nullptr;) {
    at += std::strlen(kSwitches);
    sleeps = sleeps.value_or(0) + std::strtoull(at, nullptr, 10);
  }
  return sleeps;
}

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
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
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
