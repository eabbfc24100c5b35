#include "communicator.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <thread>

namespace nccl_double {

thread_local Group group;
thread_local std::string last_error;

// Never destroyed: threads of streams may outlive the end of main.
State& state() {
  static auto* const all = new State;
  return *all;
}

int fail(int status, const std::string& text) {
  last_error = text;
  if (group.depth) group.error = status;
  return status;
}

int ordered_failure(const char* function) {
  std::unique_lock lock(state().mutex);
  if (const auto delay = state().delays.extract(function)) {
    lock.unlock();
    ++state().delayed;
    std::this_thread::sleep_for(std::chrono::milliseconds(delay.mapped()));
    --state().delayed;
    lock.lock();
  }
  const auto found = state().failing.find(function);
  if (found == state().failing.end()) return kSuccess;
  const Failing failing = found->second;
  state().failing.erase(found);
  return fail(failing.status, failing.text);
}

CommunicatorPtr find(const char* function, const void* handle, int& status) {
  if (handle == nullptr) {
    status = fail(kInvalidArgument, std::string(function) + " : comm argument is NULL");
    return nullptr;
  }
  const std::lock_guard lock(state().mutex);
  const auto found = state().communicators.find(handle);
  if (found == state().communicators.end()) {
    ++state().misuses;
    status = fail(kInvalidArgument, std::string(function) + " : the communicator has ended");
    return nullptr;
  }
  return found->second;
}

const void* keep(CommunicatorPtr communicator) {
  const std::lock_guard lock(state().mutex);
  const void* const handle = communicator.get();
  state().communicators[handle] = std::move(communicator);
  return handle;
}

void forget(const CommunicatorPtr& communicator) {
  const std::lock_guard lock(state().mutex);
  state().communicators.erase(communicator.get());
}

void Communicator::begin() {
  struct Identity {
    std::size_t host;
    long gpu;
    int version;
  };
  // NCCL reads it once, too.
  static const std::size_t host = [] {
    const char* const id = std::getenv("NCCL_HOSTID");
    return std::hash<std::string>{}(id ? id : "");
  }();
  constexpr long kApart = 0x1000;
  std::vector<Identity> all(static_cast<std::size_t>(size));
  Identity& own = all[static_cast<std::size_t>(rank)];
  own = {host, state().gpu ? state().gpu.load() : (rank + 1) * kApart, state().version};
  exchange(Lane::beginning, Operation::begin, all);
  for (int peer = 0; peer < size; ++peer) {
    const Identity& other = all[static_cast<std::size_t>(peer)];
    std::ostringstream text;
    if (other.version != own.version) {
      text << "Mismatched NCCL version detected : rank " << peer << " version " << other.version << " rank "
           << rank << " version " << own.version;
    } else if (peer != rank && other.host == own.host && other.gpu == own.gpu) {
      text << "Duplicate GPU detected : rank " << rank << " and rank " << peer << " both on CUDA device "
           << std::hex << own.gpu;
    }
    if (!text.str().empty()) throw Failure{kInvalidUsage, text.str()};
  }
  // Who has found nothing learns here that another rank has given up.
  exchange(Lane::beginning, Operation::begin, all);
}

bool Communicator::in_turn(std::uint64_t mine, const std::function<bool()>& work) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return turn == mine; });
  running = true;
  bool done = false;
  if (!aborted) {
    lock.unlock();
    try {
      done = work();
    } catch (const Failure& failure) {
      const std::lock_guard again(mutex);
      reason = failure.text;
      async_error = failure.status;
    }
    lock.lock();
    if (!done) changed.wait(lock, [&] { return aborted.load(); });
  }
  running = false;
  ++turn;
  changed.notify_all();
  return done;
}

Failure Communicator::connect(const std::vector<Operation>& operations) {
  std::vector<Outgoing> to_all, sends;
  std::vector<Incoming> from_all, receives;
  if (aborted) return {kSuccess, ""};  // in the same group: the operations are not carried out
  std::uint64_t mine;
  {
    const std::lock_guard lock(mutex);
    for (const Operation& op : operations) {
      if (op.kind == Operation::send || op.kind == Operation::recv) {
        if (op.root == rank || !connected.emplace(op.root, op.kind).second) continue;
        if (op.kind == Operation::send) sends.push_back({op.root, nullptr, 0});
        if (op.kind == Operation::recv) receives.push_back({op.root, nullptr, 0});
      } else if (op.count && !std::exchange(collectives_connected, true)) {
        for (int peer = 0; peer < size; ++peer) {
          if (peer == rank) continue;
          to_all.push_back({peer, nullptr, 0});
          from_all.push_back({peer, nullptr, 0});
        }
      }
    }
    if (to_all.empty() && sends.empty() && receives.empty()) return {kSuccess, ""};
    mine = issued++;
  }
  ++state().connecting;
  Failure failure{kInternalError, "stopped while connections were made"};
  in_turn(mine, [&] {
    try {
      if (mesh.exchange(Lane::connecting_collectives, Operation::connect, to_all, from_all, aborted) &&
          mesh.exchange(Lane::connecting_messages, Operation::connect, sends, receives, aborted)) {
        failure.status = kSuccess;
      }
    } catch (const Failure& met) {
      failure = met;
    }
    return true;
  });
  --state().connecting;
  return failure;
}

bool Communicator::lacks_connections(const std::vector<Operation>& operations) {
  const std::lock_guard lock(mutex);
  return std::any_of(operations.begin(), operations.end(), [&](const Operation& op) {
    const bool message = op.kind == Operation::send || op.kind == Operation::recv;
    if (message) return op.root != rank && !connected.contains({op.root, op.kind});
    return op.count != 0 && !collectives_connected;
  });
}

void Communicator::settle(bool all) {
  std::unique_lock lock(mutex);
  changed.notify_all();
  changed.wait(lock, [&] { return !running && (!all || turn == issued); });
}

void Communicator::finalise() {
  settle(true);
  {
    const std::lock_guard lock(mutex);
    if (std::exchange(finalised, true)) return;
  }
  mesh.part(Operation::end, aborted);
}

void hold_in_graph(const void* handle, bool on) {
  const std::lock_guard lock(state().mutex);
  auto& held = state().in_graphs;
  if (on) {
    held.insert(handle);
  } else if (const auto one = held.find(handle); one != held.end()) {
    held.erase(one);
  }
  state().graphs_changed.notify_all();
}

void end(const std::vector<CommunicatorPtr>& aborted, const std::vector<CommunicatorPtr>& destroyed) {
  for (const CommunicatorPtr& one : aborted) {
    const std::lock_guard lock(one->mutex);
    one->aborted = true;
  }
  for (const CommunicatorPtr& one : aborted) one->settle(false);
  std::vector<std::thread> finalising;
  for (const CommunicatorPtr& one : destroyed) finalising.emplace_back([one] { one->finalise(); });
  for (std::thread& one : finalising) one.join();
  std::vector<CommunicatorPtr> others;
  {
    std::unique_lock lock(state().mutex);
    for (const auto* const ended : {&aborted, &destroyed}) {
      for (const CommunicatorPtr& one : *ended) {
        state().graphs_changed.wait(lock, [&] { return !state().in_graphs.contains(one.get()); });
      }
    }
    for (const auto& [handle, other] : state().communicators) others.push_back(other);
  }
  for (const auto* const ended : {&aborted, &destroyed}) {
    for (const CommunicatorPtr& one : *ended) {
      one->mesh.leave();
      // Memory was freed, for which all kernels of the device were waited for.
      const std::lock_guard lock(one->mutex);
      follow_everywhere(one->operations_done);
    }
  }
  for (const CommunicatorPtr& other : others) other->settle(true);
}

}  // namespace nccl_double
