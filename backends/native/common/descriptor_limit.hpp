// How many descriptors this process may open, and how many of those connections of others leave to it.
#pragma once

#include <sys/resource.h>

#include <algorithm>

namespace collectives {

struct DescriptorLimit {
  rlim_t all = 0;       // `ulimit -n`
  rlim_t reserved = 0;  // for the application: a quarter, but not more than 128

  // Whether a connection that has proved nothing may keep this descriptor.
  bool leaves_room(int fd) const noexcept { return static_cast<rlim_t>(fd) < all - reserved; }
};

inline DescriptorLimit descriptor_limit() noexcept {
  rlimit limit{};
  static_cast<void>(::getrlimit(RLIMIT_NOFILE, &limit));
  return {.all = limit.rlim_cur, .reserved = std::min<rlim_t>(limit.rlim_cur / 4, 128)};
}

}  // namespace collectives
