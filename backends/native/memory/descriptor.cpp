#include "memory/descriptor.hpp"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

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

namespace {

struct KnownProcesses {
  std::mutex mutex;
  std::map<long, std::weak_ptr<const Descriptor>> processes;  // by process id, as counted here
};

// Never destroyed, so that no thread can outlive it. A forked child starts with a new one: a thread of its
// parent may have held the lock.
KnownProcesses& known_processes() {
  static KnownProcesses* only = new KnownProcesses();
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { only = new KnownProcesses(); });
  static_cast<void>(registered);
  return *only;
}

bool runs(const Descriptor& process) {
  pollfd ended{.fd = process.get(), .events = POLLIN, .revents = 0};
  return ::poll(&ended, 1, 0) == 0;
}

// The process id that a descriptor stands for, as counted here; 0 where it has none.
long id_of(const Descriptor& process) {
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(process.get()));
  std::string name;
  long id = 0;
  while (file >> name) {
    if (name == "Pid:" && file >> id) return id > 0 ? id : 0;
  }
  return 0;
}

}  // namespace

ProcessDescriptor share_process(Descriptor process) {
  if (!process) return nullptr;
  const long id = id_of(process);
  if (id == 0) return std::make_shared<const Descriptor>(std::move(process));
  KnownProcesses& known = known_processes();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.processes, [](const auto& entry) { return entry.second.expired(); });
  // An id is given again only after its process has ended: where both run they are the same.
  const auto found = known.processes.find(id);
  ProcessDescriptor earlier = found == known.processes.end() ? nullptr : found->second.lock();
  if (earlier && runs(*earlier) && runs(process)) return earlier;
  auto shared = std::make_shared<const Descriptor>(std::move(process));
  known.processes[id] = shared;
  return shared;
}

}  // namespace collectives
