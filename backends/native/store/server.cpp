#include "store/server.hpp"

#include <pthread.h>
#include <signal.h>

#include <mutex>
#include <set>
#include <utility>

#include "store/loop.hpp"

namespace collectives::store {

// fork() copies the server's descriptors but not its thread. A child that kept them would hold the port and
// every connection open after the owner has died, so that clients would never notice. The guard closes them
// in the child.
class ForkGuard {
 public:
  static ForkGuard& instance() {
    static ForkGuard* guard = new ForkGuard;  // never destroyed: fork handlers cannot be taken back
    return *guard;
  }

  void add(Server* server) {
    const std::lock_guard lock(mutex_);
    servers_.insert(server);
  }

  void remove(Server* server) {
    const std::lock_guard lock(mutex_);
    servers_.erase(server);
  }

 private:
  ForkGuard() { pthread_atfork(&before, &after_in_parent, &after_in_child); }

  static void before() {
    instance().mutex_.lock();
    for (Server* server : instance().servers_) server->loop_->descriptors().lock();
  }

  static void after_in_parent() {
    for (Server* server : instance().servers_) server->loop_->descriptors().unlock();
    instance().mutex_.unlock();
  }

  static void after_in_child() {
    for (Server* server : instance().servers_) server->abandon();
    instance().servers_.clear();
    instance().mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<Server*> servers_;
};

Server::Server(const std::vector<int>& listeners, std::size_t max_bytes, Admission admission)
    : loop_(std::make_shared<Loop>(listeners, max_bytes, std::move(admission))) {
  // Signals are for the threads of the program that owns the server.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::make_unique<std::thread>([loop = loop_.get()] {
      pthread_setname_np(pthread_self(), "store-server");
      loop->run();
    });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ForkGuard::instance().add(this);
}

Server::~Server() { stop(); }

void Server::stop() {
  if (thread_ == nullptr) return;
  ForkGuard::instance().remove(this);
  loop_->request_stop();
  thread_->join();
  thread_.reset();
  loop_.reset();
}

void Server::abandon() {
  // The thread that owned the loop's state does not exist here, and may have been in the middle of changing
  // it: its descriptors are closed, the rest is left alone and never destroyed.
  loop_->abandon();
  new std::shared_ptr<Loop>(std::move(loop_));
  static_cast<void>(thread_.release());
}

bool Server::running() const { return thread_ != nullptr; }
std::size_t Server::connections() const { return loop_ == nullptr ? 0 : loop_->connections(); }
std::size_t Server::waiting() const { return loop_ == nullptr ? 0 : loop_->waiting(); }
const Outcasts* Server::refused() const { return loop_ == nullptr ? nullptr : &loop_->refused(); }
const Outcasts* Server::forged() const { return loop_ == nullptr ? nullptr : &loop_->forged(); }

}  // namespace collectives::store
