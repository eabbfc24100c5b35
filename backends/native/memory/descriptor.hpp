// File descriptors with one owner, and what is made of them.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>

#include "common/error.hpp"

namespace collectives {

class Descriptor {
 public:
  Descriptor() noexcept = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  void reset() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// An eventfd: wakes threads that wait in poll() or epoll.

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

// Descriptors that a forked child must not hold, because a connection ends only when all its holders are
// gone: with a copy in a child that lives on, nobody would notice the parent's death.

// From now on a forked child closes it at once. Thread safe.
void close_on_fork(int descriptor);

// To be called before the descriptor is closed.
void cancel_close_on_fork(int descriptor) noexcept;

// The descriptor of another process (a pidfd), of which this process keeps one for all its groups.

using ProcessDescriptor = std::shared_ptr<const Descriptor>;

// Takes a descriptor that another process sent. Returns the one that this process has already for the same
// process, if any, and closes the new one then; empty for an empty one.
ProcessDescriptor share_process(Descriptor process);

}  // namespace collectives
