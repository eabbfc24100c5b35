// A double of NCCL for tests: its C interface on host memory, between processes of one machine.
//
// It is test equipment. What it shares with NCCL: names, argument order, codes, checks and statuses of the C
// interface, groups, blocking until all ranks have come, refusal of a GPU that two ranks use and of ranks
// with different versions, connections that first operations make, order of operations, abort from another
// thread, an orderly end that waits for all ranks. What it has instead of CUDA: streams.cpp. It is stricter
// where NCCL corrupts memory or hangs in silence: operations that do not match between ranks become
// asynchronous errors, and calls with an ended communicator are counted.
//
// Operations of a communicator run one after the other, in the order of their calls. One that fails stays
// unfinished, as a kernel does, until the communicator is aborted.
#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "communicator.hpp"
#include "elements.hpp"
#include "streams.hpp"

namespace nccl_double {
namespace {

int issue(const char* function, const void* handle, Operation op) {
  use_device();
  if (const int status = ordered_failure(function)) return status;
  int status = kSuccess;
  const CommunicatorPtr comm = find(function, handle, status);
  if (!comm) return status;
  if (const int error = comm->async_error) return fail(error, comm->failure());
  const auto refuse = [&](const char* what, int value) {
    return fail(kInvalidArgument, std::string(function) + " : invalid " + what + " " + std::to_string(value));
  };
  if (op.type < 0 || op.type >= kTypes) return refuse("type", op.type);
  if (op.root < 0 || op.root >= comm->size) return refuse("root", op.root);
  int built_in = op.op;
  if (op.op >= kBuiltInOps) {
    const std::lock_guard lock(comm->mutex);
    const auto made = comm->ops.find(op.op);
    if (made == comm->ops.end() || made->second.first != op.type) return refuse("reduction operation", op.op);
    op.factor = made->second.second;
    built_in = kSum;
  }
  if (op.op < 0) return refuse("reduction operation", op.op);
  if (!stream_exists(op.stream)) return fail(kUnhandledCudaError, "the stream does not exist");
  {
    const std::lock_guard lock(state().mutex);
    std::ostringstream last;
    last << function << ' ' << op.count << ' ' << op.type << ' ' << op.op << ' ' << op.root << ' '
         << op.stream << ' ' << reinterpret_cast<std::intptr_t>(handle);
    state().last = last.str();
  }
  if (state().dry) return kSuccess;
  op.op = built_in;
  if (group.depth) {
    group.operations.emplace_back(comm, std::move(op));
    return kSuccess;
  }
  return launch({{comm, std::move(op)}});
}

// An attribute of a configuration: the version that reads it first, and what it takes.
struct Attribute {
  const char* name;
  int since;
  int Config::* number;  // null for a text
  const char* Config::* text = nullptr;
  int least = INT_MIN;
  int most = INT_MAX;
};

const Attribute kAttributes[] = {
    {"blocking", 0, &Config::blocking},
    {"cgaClusterSize", 21700, &Config::cgaClusterSize, nullptr, 0, 8},
    {"minCTAs", 21700, &Config::minCTAs, nullptr, 1},
    {"maxCTAs", 21700, &Config::maxCTAs, nullptr, 1},
    {"netName", 21700, nullptr, &Config::netName},
    {"splitShare", 21800, &Config::splitShare, nullptr, 0, 1},
    {"trafficClass", 22600, &Config::trafficClass},
    {"commName", 22700, nullptr, &Config::commName},
    {"collnetEnable", 22700, &Config::collnetEnable, nullptr, 0, 1},
    {"CTAPolicy", 22700, &Config::CTAPolicy, nullptr, 0, 3},
    {"shrinkShare", 22700, &Config::shrinkShare},
    {"nvlsCTAs", 22700, &Config::nvlsCTAs, nullptr, 1},
    {"nChannelsPerNetPeer", 22800, &Config::nChannelsPerNetPeer, nullptr, 1, 64},
    {"nvlinkCentricSched", 22800, &Config::nvlinkCentricSched, nullptr, 0, 1},
    {"graphUsageMode", 22900, &Config::graphUsageMode, nullptr, 0, 2},
    {"numRmaCtx", 22900, &Config::numRmaCtx, nullptr, 0},
    {"maxP2pPeers", 23000, &Config::maxP2pPeers, nullptr, 1},
    {"graphStreamOrdering", 23005, &Config::graphStreamOrdering, nullptr, 0, 1},
};

// Takes what the caller gave of a configuration, on top of the defaults or of the parent's: as much as both
// the library and the version that the caller names know, as it grows at its end.
int read_config(const Config* given, Config& config) {
  if (given == nullptr) return kSuccess;
  if (given->magic != kConfigMagic || given->size < offsetof(Config, cgaClusterSize)) {
    return fail(kInvalidArgument, "the configuration was not initialised");
  }
  const int version = state().version;
  const auto* const end = reinterpret_cast<const std::byte*>(given) + given->size;
  Config merged;
  for (const Attribute& one : kAttributes) {
    if (one.since > version || one.since > static_cast<int>(given->version)) break;
    if (one.number == nullptr) {
      if (reinterpret_cast<const std::byte*>(&(given->*one.text) + 1) > end) break;
      merged.*one.text = given->*one.text;
      continue;
    }
    if (reinterpret_cast<const std::byte*>(&(given->*one.number) + 1) > end) break;
    const int value = merged.*one.number = given->*one.number;
    const int most = one.number == &Config::CTAPolicy && version < 22800 ? 1 : one.most;
    if (value != kUndefined && (value < one.least || value > most)) {
      return fail(kInvalidArgument, std::string("the configuration has an invalid value of ") + one.name);
    }
  }
  if (merged.minCTAs > merged.maxCTAs) {  // also where the upper bound is undefined
    return fail(kInvalidArgument, "the configuration has an invalid number of CTAs");
  }
  if (merged.graphStreamOrdering == 0 &&
      (merged.graphUsageMode == 2 || merged.graphUsageMode == kUndefined)) {
    merged.graphStreamOrdering = 1;
  }
  // Of this text NCCL has a copy of its own; that of commName stays the caller's.
  if (merged.netName) merged.netName = strdup(merged.netName);
  config = merged;
  return kSuccess;
}

int make(const void** handle, const std::string& name, int rank, int size, const Config& config) {
  try {
    const auto made = std::make_shared<Communicator>(name, rank, size, config);
    made->begin();
    *handle = keep(made);
  } catch (const Failure& failure) {
    return fail(failure.status, failure.text);
  }
  return kSuccess;
}

int init(const void** handle, int size, const UniqueId& id, int rank, const Config* given) {
  use_device();
  if (handle == nullptr) return fail(kInvalidArgument, "CommInitRank : comm argument is NULL");
  if (size < 1 || rank < 0 || rank >= size || std::memcmp(id.bytes, "double\0", 8) != 0) {
    return fail(kInvalidArgument, "CommInitRank : invalid rank " + std::to_string(rank) + " of " +
                                      std::to_string(size) + " or unique id");
  }
  Config config;
  if (const int status = read_config(given, config)) return status;
  std::string name;
  for (int i = 8; i < 24; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(id.bytes[i]));
    name += digits;
  }
  return make(handle, name, rank, size, config);
}

int split(const CommunicatorPtr& comm, int color, int key, const void** handle, const Config* given) {
  use_device();
  Config config = comm->config;
  if (const int status = read_config(given, config)) return status;
  std::uint64_t turn, number;
  {
    const std::lock_guard lock(comm->mutex);
    if (comm->turn != comm->issued) {
      return fail(kInvalidUsage, "CommSplit : an operation of the communicator is under way");
    }
    turn = comm->issued++;
    number = comm->splits++;
  }
  struct Choice {
    int color, key, rank;
  };
  std::vector<Choice> choices(static_cast<std::size_t>(comm->size));
  choices[static_cast<std::size_t>(comm->rank)] = {color, key, comm->rank};
  const bool done =
      comm->in_turn(turn, [&] { return comm->exchange(Lane::collective, Operation::split, choices); });
  if (!done) return fail(kInternalError, "CommSplit : stopped");
  *handle = nullptr;
  if (color < 0) return kSuccess;
  std::erase_if(choices, [&](const Choice& choice) { return choice.color != color; });
  std::stable_sort(choices.begin(), choices.end(),
                   [](const Choice& left, const Choice& right) { return left.key < right.key; });
  int rank = 0;
  while (choices[static_cast<std::size_t>(rank)].rank != comm->rank) ++rank;
  // All members derive the same name, which no other communicator has.
  const std::string path = comm->name + "/" + std::to_string(number) + "/" + std::to_string(color);
  return make(handle, path, rank, static_cast<int>(choices.size()), config);
}

Operation operation(Operation::Kind kind, const void* from, void* to, std::size_t count, int type, int op,
                    int root, std::intptr_t stream) {
  return {
      kind, static_cast<const std::byte*>(from), static_cast<std::byte*>(to), count, type, op, root, stream,
      {}};
}

}  // namespace
}  // namespace nccl_double

using namespace nccl_double;

// NCCL's functions. Streams are numbers here, and communicators are opaque.
extern "C" {

int ncclGetVersion(int* version) {
  if (version == nullptr) return fail(kInvalidArgument, "GetVersion : version argument is NULL");
  *version = state().version;
  return kSuccess;
}

const char* ncclGetErrorString(int status) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress",
                                      "NCCL operation timed out"};
  return status >= 0 && status < 9 ? texts[status] : "unknown result code";
}

const char* ncclGetLastError(const void*) { return last_error.c_str(); }

int ncclGetUniqueId(UniqueId* id) {
  if (const int status = ordered_failure("ncclGetUniqueId")) return status;
  if (id == nullptr) return fail(kInvalidArgument, "GetUniqueId : id argument is NULL");
  // The bytes after the random ones are not zero, those between are: all 128 have to be passed on.
  std::memset(id->bytes, 0x5a, sizeof(id->bytes));
  std::memcpy(id->bytes, "double\0", 8);
  std::random_device random;
  for (int i = 8; i < 24; ++i) id->bytes[i] = static_cast<char>(random());
  id->bytes[127] = 0;
  return kSuccess;
}

int ncclCommInitRankConfig(const void** comm, int size, UniqueId id, int rank, const Config* config) {
  if (const int status = ordered_failure("ncclCommInitRankConfig")) return status;
  return init(comm, size, id, rank, config);
}

int ncclCommInitRank(const void** comm, int size, UniqueId id, int rank) {
  if (const int status = ordered_failure("ncclCommInitRank")) return status;
  return init(comm, size, id, rank, nullptr);
}

// Only the name is needed, as providers bind it.
int ncclCommInitAll(const void**, int, const int*) {
  return fail(kInvalidUsage, "CommInitAll : the double has one rank in a process");
}

int ncclCommSplit(const void* handle, int color, int key, const void** made, const Config* config) {
  if (const int status = ordered_failure("ncclCommSplit")) return status;
  int status = kSuccess;
  const CommunicatorPtr comm = find("CommSplit", handle, status);
  if (!comm) return status;
  if (color < -1) return fail(kInvalidArgument, "CommSplit : invalid color " + std::to_string(color));
  return split(comm, color, key, made, config);
}

int ncclCommFinalize(const void* handle) {
  int status = kSuccess;
  const CommunicatorPtr comm = find("CommFinalize", handle, status);
  if (comm) comm->finalise();
  return status;
}

int ncclCommDestroy(const void* handle) {
  if (handle == nullptr) return kSuccess;
  use_device();
  if (const int status = ordered_failure("ncclCommDestroy")) return status;
  int status = kSuccess;
  const CommunicatorPtr comm = find("CommDestroy", handle, status);
  if (!comm) return status;
  forget(comm);
  if (group.depth) {
    group.destroys.push_back(comm);
  } else {
    end({}, {comm});
  }
  return kSuccess;
}

int ncclCommAbort(const void* handle) {
  if (handle == nullptr) return kSuccess;
  use_device();
  int status = kSuccess;
  const CommunicatorPtr comm = find("CommAbort", handle, status);
  if (!comm) return status;
  forget(comm);
  if (group.depth) {
    group.aborts.push_back(comm);
  } else {
    end({comm}, {});
  }
  return kSuccess;
}

int ncclCommGetAsyncError(const void* handle, int* error) {
  if (const int ordered = ordered_failure("ncclCommGetAsyncError")) return ordered;
  int status = kSuccess;
  const CommunicatorPtr comm = find("CommGetAsyncError", handle, status);
  if (!comm) return status;
  *error = comm->async_error;
  if (*error) last_error = comm->failure();
  return status;
}

int ncclCommCount(const void* handle, int* count) {
  int status = kSuccess;
  const CommunicatorPtr comm = find("CommCount", handle, status);
  if (comm) *count = comm->size;
  return status;
}

int ncclCommCuDevice(const void* handle, int* device) {
  int status = kSuccess;
  if (find("CommCuDevice", handle, status)) *device = 0;
  return status;
}

int ncclCommUserRank(const void* handle, int* rank) {
  int status = kSuccess;
  const CommunicatorPtr comm = find("CommUserRank", handle, status);
  if (comm) *rank = comm->rank;
  return status;
}

int ncclRedOpCreatePreMulSum(int* op, const void* scalar, int type, int residence, const void* handle) {
  int status = kSuccess;
  const CommunicatorPtr comm = find("RedOpCreatePreMulSum", handle, status);
  if (!comm) return status;
  if (op == nullptr || scalar == nullptr || type < 0 || type >= kTypes || residence < 0 || residence > 1) {
    return fail(kInvalidArgument, "RedOpCreatePreMulSum : invalid argument");
  }
  const auto* const bytes = static_cast<const std::byte*>(scalar);
  const std::lock_guard lock(comm->mutex);
  *op = comm->next_op++;
  comm->ops[*op] = {type, {bytes, bytes + element_bytes(type)}};
  return kSuccess;
}

int ncclRedOpDestroy(int op, const void* handle) {
  int status = kSuccess;
  const CommunicatorPtr comm = find("RedOpDestroy", handle, status);
  if (!comm) return status;
  const std::lock_guard lock(comm->mutex);
  if (!comm->ops.erase(op)) return fail(kInvalidArgument, "RedOpDestroy : invalid op " + std::to_string(op));
  return kSuccess;
}

int ncclAllReduce(const void* from, void* to, std::size_t count, int type, int op, const void* comm,
                  std::intptr_t stream) {
  return issue("ncclAllReduce", comm, operation(Operation::all_reduce, from, to, count, type, op, 0, stream));
}

int ncclReduce(const void* from, void* to, std::size_t count, int type, int op, int root, const void* comm,
               std::intptr_t stream) {
  return issue("ncclReduce", comm, operation(Operation::reduce, from, to, count, type, op, root, stream));
}

int ncclBroadcast(const void* from, void* to, std::size_t count, int type, int root, const void* comm,
                  std::intptr_t stream) {
  return issue("ncclBroadcast", comm,
               operation(Operation::broadcast, from, to, count, type, kSum, root, stream));
}

int ncclBcast(void* data, std::size_t count, int type, int root, const void* comm, std::intptr_t stream) {
  return issue("ncclBcast", comm,
               operation(Operation::broadcast, data, data, count, type, kSum, root, stream));
}

int ncclAllGather(const void* from, void* to, std::size_t count, int type, const void* comm,
                  std::intptr_t stream) {
  return issue("ncclAllGather", comm,
               operation(Operation::all_gather, from, to, count, type, kSum, 0, stream));
}

int ncclReduceScatter(const void* from, void* to, std::size_t count, int type, int op, const void* comm,
                      std::intptr_t stream) {
  return issue("ncclReduceScatter", comm,
               operation(Operation::reduce_scatter, from, to, count, type, op, 0, stream));
}

int ncclSend(const void* from, std::size_t count, int type, int peer, const void* comm,
             std::intptr_t stream) {
  return issue("ncclSend", comm, operation(Operation::send, from, nullptr, count, type, kSum, peer, stream));
}

int ncclRecv(void* to, std::size_t count, int type, int peer, const void* comm, std::intptr_t stream) {
  return issue("ncclRecv", comm, operation(Operation::recv, nullptr, to, count, type, kSum, peer, stream));
}

int ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (group.depth == 0) return fail(kInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group.depth) return kSuccess;
  const Group ended = std::exchange(group, {});
  use_device();
  if (!ended.aborts.empty() || !ended.destroys.empty()) end(ended.aborts, ended.destroys);
  if (ended.error) return ended.error;
  return ended.operations.empty() ? kSuccess : launch(ended.operations);
}

// The functions that tests call beside NCCL's.

// Lets the next call of a function fail.
int double_fail_next(const char* function, int status, const char* text) {
  const std::lock_guard lock(state().mutex);
  state().failing[function] = {status, text};
  return 0;
}

// Holds the next call of a function up before it looks at its communicator.
int double_delay_next(const char* function, int milliseconds) {
  const std::lock_guard lock(state().mutex);
  state().delays[function] = milliseconds;
  return 0;
}

// Returns how many calls are held up.
int double_delayed() { return state().delayed; }

// Gives a communicator an asynchronous error; its operations go on. Returns 0, or 4 where there is none.
int double_set_async_error(const void* handle, int error, const char* reason) {
  int status = kSuccess;
  const CommunicatorPtr comm = find("double_set_async_error", handle, status);
  if (!comm) return status;
  const std::lock_guard lock(comm->mutex);
  comm->reason = reason;
  comm->async_error = error;
  return status;
}

// Lets a graph hold operations of a communicator, which cannot end then, or lets the graph go.
int double_hold_in_graph(const void* handle, int on) {
  hold_in_graph(handle, on != 0);
  return 0;
}

// With dry runs, operations are checked and noted, but not carried out, whatever counts and pointers they
// have.
int double_dry_run(int on) {
  state().dry = on != 0;
  return 0;
}

// Returns the operation that was called last: its function, count, type, reduction, root, stream,
// communicator.
const char* double_last_call() {
  thread_local std::string text;
  const std::lock_guard lock(state().mutex);
  text = state().last;
  return text.c_str();
}

int double_set_version(int version) {
  state().version = version;
  return 0;
}

// Lets this process say that it uses a GPU, which others may say, too.
int double_set_gpu(long bus) {
  state().gpu = bus;
  return 0;
}

// Returns how many calls used a communicator after its end.
int double_misuses() { return state().misuses; }

// Returns how often operations were launched; those of a group of calls are launched once.
int double_launches() { return state().launches; }

// Returns how many threads are in calls that make connections, and wait for other ranks.
int double_connecting() { return state().connecting; }

// Returns how many communicators have not been ended.
int double_communicators() {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().communicators.size());
}

// Returns the configuration that a communicator was made with, but what was left open: a line for each
// attribute, good until this thread's next call. The texts are those that stand there now.
const char* double_config(const void* handle) {
  thread_local std::string text;
  text.clear();
  int status = kSuccess;
  const CommunicatorPtr comm = find("double_config", handle, status);
  if (!comm) return text.c_str();
  for (const Attribute& one : kAttributes) {
    std::string value;
    if (one.number == nullptr) {
      if (comm->config.*one.text) value = comm->config.*one.text;
    } else if (comm->config.*one.number != kUndefined) {
      value = std::to_string(comm->config.*one.number);
    }
    if (!value.empty()) text += std::string(one.name) + "=" + value + "\n";
  }
  return text.c_str();
}

}  // extern "C"
