#include "memory/close_on_fork.hpp"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace collectives {
namespace {

struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
};

// Never destroyed, so that no thread can outlive it.
Registry& registry() {
  static Registry* only = new Registry();
  return *only;
}

void register_handlers() {
  // The lock is held over the fork, so that the child finds the set whole.
  ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     for (const int descriptor : registry().descriptors) ::close(descriptor);
                     registry().descriptors.clear();
                     registry().mutex.unlock();
                   });
}

}  // namespace

void close_on_fork(int descriptor) {
  static const bool registered = (register_handlers(), true);
  static_cast<void>(registered);
  const std::lock_guard lock(registry().mutex);
  registry().descriptors.insert(descriptor);
}

void cancel_close_on_fork(int descriptor) noexcept {
  const std::lock_guard lock(registry().mutex);
  registry().descriptors.erase(descriptor);
}

}  // namespace collectives
