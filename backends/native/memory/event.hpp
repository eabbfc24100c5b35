// An eventfd: wakes threads that wait in poll() or epoll.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "common/error.hpp"
#include "memory/descriptor.hpp"

namespace collectives {

inline Descriptor make_event() {
  Descriptor event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw Error(ErrorKind::resources, with_errno("eventfd failed", errno));
  return event;
}

// Makes it readable. An empty descriptor is left alone, here and below.
inline void signal_event(const Descriptor& event) noexcept {
  const std::uint64_t one = 1;
  // It fails only where it is readable anyway.
  if (event) static_cast<void>(!::write(event.get(), &one, sizeof(one)));
}

inline void clear_event(const Descriptor& event) noexcept {
  std::uint64_t count = 0;
  if (event) static_cast<void>(!::read(event.get(), &count, sizeof(count)));
}

}  // namespace collectives
