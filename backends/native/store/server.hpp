// The TCP store's server: one thread, one epoll set, no Python.
//
// The thread sleeps in epoll_wait; waiting clients cost nothing until their key appears. Whatever a client
// sends, only its own connection can suffer: requests are bounds-checked (decoder.hpp), input is taken in
// small turns so that a flood delays nobody, and a client that does not read its replies is not read from
// either.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "store/admission.hpp"

namespace collectives::store {

class Loop;

class Server {
 public:
  // Serves on sockets that are bound and listening already; takes them over, also if it throws
  // std::system_error.
  explicit Server(const std::vector<int>& listeners, Admission admission = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Closes every connection and ends the thread; idempotent. In a process forked from the owner the server is
  // not running: there the call does nothing.
  void stop();

  bool running() const;
  std::size_t connections() const;  // open connections, as of the last turn of the loop
  std::size_t waiting() const;      // clients in a wait or a barrier, likewise

 private:
  friend class ForkGuard;
  void abandon();

  std::unique_ptr<Loop> loop_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace collectives::store
