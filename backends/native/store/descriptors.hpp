// The file descriptors of a server, kept so that a forked child can close them without touching anything
// else.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <new>
#include <vector>

namespace collectives::store {

class Descriptors {
 public:
  ~Descriptors() { close_all(); }

  // Calls `make`, which opens a descriptor or returns -1, and keeps its result; no fork can come in between.
  // Without memory it returns -1, with errno ENOMEM.
  template <typename Make>
  int open(Make make) {
    const std::lock_guard lock(mutex_);
    try {
      if (open_.size() == open_.capacity()) open_.reserve(2 * open_.size() + 16);
    } catch (const std::bad_alloc&) {
      errno = ENOMEM;
      return -1;
    }
    const int fd = make();
    if (fd >= 0) open_.push_back(fd);
    return fd;
  }

  void close(int fd) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find(open_.begin(), open_.end(), fd);
    if (found == open_.end()) return;
    *found = open_.back();
    open_.pop_back();
    ::close(fd);
  }

  // Not locked: for the destructor, and for a forked child, which holds the lock since before the fork.
  void close_all() {
    for (const int fd : open_) ::close(fd);
    open_.clear();
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  std::vector<int> open_;
};

}  // namespace collectives::store
