// The TCP store's server: one thread, one epoll set, no Python. Clients of the server's own process need no
// socket: their threads carry their requests out between the turns of the server's (store_client/local.hpp).
//
// The thread sleeps in epoll_wait; waiting clients cost nothing until their key appears. Whatever a client
// sends, only its own connection can suffer: requests are bounds-checked (decoder.hpp), input is taken and
// output is made in small turns so that neither a flood nor a long reply delays anybody (session.hpp), a
// client that does not read its replies is not read from either, and memory and descriptors have limits
// (budget.hpp, Loop::admit). No exception leaves the thread: it ends the connection that caused it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "store/admission.hpp"
#include "store/outcasts.hpp"

namespace collectives::store {

class Loop;

class Server {
 public:
  // Serves on sockets that are bound and listening already; takes them over, also if it throws
  // std::system_error. `max_bytes` limits what it holds for its clients.
  Server(const std::vector<int>& listeners, std::size_t max_bytes, Admission admission = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Closes every connection and ends the thread; idempotent. In a process forked from the owner the server is
  // not running: there the call does nothing.
  void stop();

  // For clients of this process, `store_client/local.hpp`; empty where the server does not run.
  std::weak_ptr<Loop> loop() const { return loop_; }

  bool running() const;
  std::size_t connections() const;  // open connections, as of the last turn of the loop
  std::size_t waiting() const;      // clients in a wait or a barrier, likewise
  // What has been closed until now; nothing once it has stopped.
  const Outcasts* refused() const;  // connections that were not let in
  const Outcasts* forged() const;   // those of clients that others tampered with

 private:
  friend class ForkGuard;
  void abandon();

  std::shared_ptr<Loop> loop_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace collectives::store
