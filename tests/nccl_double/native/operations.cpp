// What operations do when their stream gets to them.
#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "communicator.hpp"
#include "streams.hpp"

namespace nccl_double {
namespace {

// Carries out a collective; returns false where it was stopped.
bool run_collective(Communicator& comm, const Operation& op) {
  const std::size_t width = element_bytes(op.type);
  const std::size_t bytes = op.count * width;
  const bool whole = op.kind == Operation::all_reduce || op.kind == Operation::reduce;
  const bool reduces = whole || op.kind == Operation::reduce_scatter;
  const std::size_t own_bytes = op.kind == Operation::reduce_scatter ? bytes * comm.size : bytes;

  const std::byte* from = op.from;
  std::vector<std::byte> scaled;
  if (reduces && !op.factor.empty()) {
    scaled.resize(own_bytes);
    multiply(op.type, op.factor.data(), from, scaled.data(), own_bytes / width);
    from = scaled.data();
  }
  const auto part = [&](int rank) { return static_cast<std::size_t>(rank) * bytes; };
  const bool at_root = comm.rank == op.root;
  std::vector<std::vector<std::byte>> inputs(reduces ? static_cast<std::size_t>(comm.size) : 0);
  std::vector<Outgoing> sends;
  std::vector<Incoming> receives;
  for (int peer = 0; peer < comm.size; ++peer) {
    if (peer == comm.rank) continue;
    switch (op.kind) {
      case Operation::broadcast:
        if (at_root) sends.push_back({peer, from, bytes});
        if (peer == op.root) receives.push_back({peer, op.to, bytes});
        break;
      case Operation::all_gather:
        sends.push_back({peer, from, bytes});
        receives.push_back({peer, op.to + part(peer), bytes});
        break;
      default:  // a reduction
        if (op.kind != Operation::reduce || peer == op.root) {
          sends.push_back({peer, from + (whole ? 0 : part(peer)), bytes});
        }
        if (op.kind != Operation::reduce || at_root) {
          inputs[static_cast<std::size_t>(peer)].resize(bytes);
          receives.push_back({peer, inputs[static_cast<std::size_t>(peer)].data(), bytes});
        }
    }
  }
  if (!comm.mesh.exchange(Lane::collective, op.kind, sends, receives, comm.aborted)) return false;
  if (reduces) {
    if (op.kind == Operation::reduce && !at_root) return true;
    std::vector<const std::byte*> ordered;
    for (int rank = 0; rank < comm.size; ++rank) {
      ordered.push_back(rank == comm.rank ? from + (whole ? 0 : part(rank))
                                          : inputs[static_cast<std::size_t>(rank)].data());
    }
    nccl_double::reduce(op.type, op.op, ordered, op.to, op.count);
  } else if (op.kind == Operation::all_gather) {
    std::memmove(op.to + part(comm.rank), from, bytes);
  } else if (at_root) {
    std::memmove(op.to, from, bytes);
  }
  return true;
}

// Carries out the operations of a group: its collectives one by one, then all its messages at once.
bool run_all(Communicator& comm, const std::vector<Operation>& operations) {
  std::vector<Outgoing> sends;
  std::vector<Incoming> receives;
  for (const Operation& op : operations) {
    const std::size_t bytes = op.count * element_bytes(op.type);
    if (op.kind == Operation::send) {
      sends.push_back({op.root, op.from, bytes});
    } else if (op.kind == Operation::recv) {
      receives.push_back({op.root, op.to, bytes});
    } else if (op.count != 0 && !run_collective(comm, op)) {
      return false;
    }
  }
  return comm.mesh.exchange(Lane::point_to_point, Operation::send, sends, receives, comm.aborted);
}

// Returns what an operation of NCCL accesses on this rank.
Accesses accesses_of(const Communicator& comm, const Operation& op) {
  static const std::map<Operation::Kind, const char*> names = {
      {Operation::all_reduce, "ncclAllReduce"},
      {Operation::reduce, "ncclReduce"},
      {Operation::broadcast, "ncclBroadcast"},
      {Operation::all_gather, "ncclAllGather"},
      {Operation::send, "ncclSend"},
      {Operation::reduce_scatter, "ncclReduceScatter"},
      {Operation::recv, "ncclRecv"}};
  const std::size_t bytes = op.count * element_bytes(op.type);
  const std::size_t everyones = bytes * static_cast<std::size_t>(comm.size);
  const bool at_root = comm.rank == op.root;
  const bool rooted = op.kind == Operation::reduce || op.kind == Operation::broadcast;
  Accesses found{names.at(op.kind), {}};
  if (op.kind != Operation::recv && (op.kind != Operation::broadcast || at_root)) {
    found.ranges.push_back(reads(op.from, op.kind == Operation::reduce_scatter ? everyones : bytes));
  }
  if (op.kind != Operation::send && (!rooted || at_root || op.kind == Operation::broadcast)) {
    found.ranges.push_back(writes(op.to, op.kind == Operation::all_gather ? everyones : bytes));
  }
  return found;
}

std::vector<Accesses> accesses_of(const Communicator& comm, const std::vector<Operation>& ops) {
  std::vector<Accesses> found;
  for (const Operation& op : ops) found.push_back(accesses_of(comm, op));
  return found;
}

using Parts = std::vector<std::pair<CommunicatorPtr, std::vector<Operation>>>;

std::uint64_t take_turn(Communicator& comm) {
  const std::lock_guard lock(comm.mutex);
  return comm.issued++;
}

// Notes operations that start together as one node of a graph, which every launch carries out anew.
int capture_launch(const Parts& parts) {
  std::vector<const void*> owners;
  for (const auto& [comm, ops] : parts) {
    bool broken = false;
    for (const Operation& op : ops) {
      if (!is_captured(op.stream, &broken) || broken) {
        return fail(kUnhandledCudaError,
                    "an operation of the group is not captured, or its capture is invalid");
      }
    }
    if (comm->lacks_connections(ops)) {
      return fail(kUnhandledCudaError, "connections cannot be made while a graph is captured");
    }
    owners.push_back(comm.get());
  }
  const std::intptr_t stream = parts.front().second.front().stream;
  const auto join = [&](std::intptr_t from, std::intptr_t into) {
    if (from == into) return;
    const auto event = make_event();
    record(event, from);
    await(event, into);
  };
  for (const auto& [comm, ops] : parts) {
    for (const Operation& op : ops) join(op.stream, stream);
  }
  const auto prepare = [parts](const Place&) {
    std::vector<std::uint64_t> turns;
    for (const auto& [comm, ops] : parts) turns.push_back(take_turn(*comm));
    return [parts, turns] {
      std::vector<std::thread> helpers;  // the communicators do not wait for each other
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto& [comm, ops] = parts[i];
        helpers.emplace_back([comm = comm, ops = ops, turn = turns[i]] {
          comm->in_turn(turn, [&] { return run_all(*comm, ops); });
        });
      }
      for (std::thread& helper : helpers) helper.join();
    };
  };
  std::vector<Accesses> accesses;
  for (const auto& [comm, ops] : parts) {
    for (const Operation& op : ops) accesses.push_back(accesses_of(*comm, op));
  }
  capture(stream, prepare, owners, accesses);
  for (const auto& [comm, ops] : parts) {
    for (const Operation& op : ops) join(stream, op.stream);
  }
  return kSuccess;
}

}  // namespace

int launch(const std::vector<std::pair<CommunicatorPtr, Operation>>& operations) {
  ++state().launches;
  Parts parts;
  for (const auto& [comm, op] : operations) {
    const auto same = [&, &comm = comm](const auto& part) { return part.first == comm; };
    auto part = std::find_if(parts.begin(), parts.end(), same);
    if (part == parts.end()) part = parts.insert(part, {comm, {}});
    part->second.push_back(op);
  }
  if (std::any_of(operations.begin(), operations.end(),
                  [](const auto& one) { return is_captured(one.second.stream); })) {
    return capture_launch(parts);
  }
  std::vector<std::thread> helpers;
  std::vector<Failure> failures(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto connect = [&, i] { failures[i] = parts[i].first->connect(parts[i].second); };
    if (parts.size() == 1) connect();
    if (parts.size() > 1) helpers.emplace_back(connect);
  }
  for (std::thread& helper : helpers) helper.join();
  for (const Failure& failure : failures) {
    if (failure.status) return fail(failure.status, failure.text);
  }
  helpers.clear();
  for (const auto& [comm, ops] : parts) {
    const std::uint64_t turn = take_turn(*comm);
    const auto work = [comm = comm, ops = ops, turn] {
      comm->in_turn(turn, [&] { return run_all(*comm, ops); });
    };
    const std::intptr_t stream = ops.front().stream;
    if (stream == 0 && parts.size() > 1) {  // the communicators do not wait for each other
      helpers.emplace_back(work);
      continue;
    }
    const auto other = [&](const Operation& op) { return op.stream != stream; };
    const auto done = make_event();
    for (const Operation& op : ops) {
      if (!other(op)) continue;
      const auto ready = make_event();
      record(ready, op.stream);
      await(ready, stream);
    }
    enqueue(stream, work, accesses_of(*comm, ops));
    record(done, stream);
    comm->is_behind(clock_of(stream));
    for (const Operation& op : ops) {
      if (other(op)) await(done, op.stream);
    }
  }
  for (std::thread& helper : helpers) helper.join();
  return kSuccess;
}

}  // namespace nccl_double
