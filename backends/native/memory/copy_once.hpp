// Reading what another process can write at any time.
#pragma once

#include <atomic>
#include <cstring>
#include <type_traits>

namespace collectives {

// A private copy. What has been checked stays so: the compiler may not read the shared memory again instead.
template <class T>
T copy_once(const T& shared) noexcept {
  static_assert(std::is_trivially_copyable_v<T>);
  T copy;
  std::memcpy(&copy, &shared, sizeof(copy));
  // For the compiler alone: it must suppose that the shared memory changes here. Nothing is ordered.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return copy;
}

}  // namespace collectives
