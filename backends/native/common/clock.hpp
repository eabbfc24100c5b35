// Time in nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
#pragma once

#include <time.h>

#include <cstdint>
#include <limits>

namespace collectives {

using Nanoseconds = std::int64_t;

inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSecond = 1'000'000'000;
inline constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();

inline Nanoseconds read_clock(clockid_t clock) noexcept {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<Nanoseconds>(now.tv_sec) * kSecond + now.tv_nsec;
}

inline Nanoseconds now_ns() noexcept { return read_clock(CLOCK_MONOTONIC); }

// The same clock as of the last tick (a few milliseconds old), at a fifth of the price.
inline Nanoseconds coarse_now_ns() noexcept { return read_clock(CLOCK_MONOTONIC_COARSE); }

// The moment `timeout` from now; `kNever` where that lies beyond the clock.
inline Nanoseconds deadline_after(Nanoseconds timeout, Nanoseconds now = now_ns()) noexcept {
  return timeout > kNever - now ? kNever : now + timeout;
}

}  // namespace collectives
