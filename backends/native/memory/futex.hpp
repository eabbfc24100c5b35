// Sleeping until a 32-bit word changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "common/clock.hpp"

namespace collectives {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

enum class FutexScope { process, machine };

// Sleeps while `word` holds `expected`, at most `timeout`; wakes without a reason at times. Returns false
// when a signal handler ran meanwhile.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, Nanoseconds timeout,
                       FutexScope scope) noexcept {
  if (timeout <= 0) return true;
  const timespec limit{static_cast<time_t>(timeout / kSecond), static_cast<long>(timeout % kSecond)};
  const int flag = scope == FutexScope::process ? FUTEX_PRIVATE_FLAG : 0;
  return ::syscall(SYS_futex, &word, FUTEX_WAIT | flag, expected, &limit, nullptr, 0) == 0 || errno != EINTR;
}

// Wakes at most `count` threads.
inline void futex_wake(std::atomic<std::uint32_t>& word, int count, FutexScope scope) noexcept {
  const int flag = scope == FutexScope::process ? FUTEX_PRIVATE_FLAG : 0;
  ::syscall(SYS_futex, &word, FUTEX_WAKE | flag, count, nullptr, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word, FutexScope scope) noexcept {
  futex_wake(word, INT_MAX, scope);
}

}  // namespace collectives
