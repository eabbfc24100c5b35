// Connections that a server has closed for one reason: how many, and from where the last one came.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

namespace collectives::store {

// Any thread may ask.
class Outcasts {
 public:
  void add(int socket) noexcept;

  std::size_t count() const noexcept { return count_.load(std::memory_order_relaxed); }
  // An address; empty where it is not known.
  std::string last() const;

 private:
  std::atomic<std::size_t> count_{0};
  mutable std::mutex lock_;
  sockaddr_storage last_{};
};

}  // namespace collectives::store
