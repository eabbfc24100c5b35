// Communicators of the double, and what its functions share: state, groups of calls, failures.
#pragma once

#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "elements.hpp"
#include "mesh.hpp"
#include "races.hpp"

namespace nccl_double {

constexpr unsigned kConfigMagic = 0xcafebeef;
constexpr int kUndefined = INT_MIN;
constexpr int kVersion = 23007;

// ncclConfig_t of NCCL 2.30; older callers pass a shorter one.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = kConfigMagic;
  unsigned version = kVersion;
  int blocking = kUndefined;
  int cgaClusterSize = kUndefined;
  int minCTAs = kUndefined;
  int maxCTAs = kUndefined;
  const char* netName = nullptr;
  int splitShare = kUndefined;
  int trafficClass = kUndefined;
  const char* commName = nullptr;
  int collnetEnable = kUndefined;
  int CTAPolicy = kUndefined;
  int shrinkShare = kUndefined;
  int nvlsCTAs = kUndefined;
  int nChannelsPerNetPeer = kUndefined;
  int nvlinkCentricSched = kUndefined;
  int graphUsageMode = kUndefined;
  int numRmaCtx = kUndefined;
  int maxP2pPeers = kUndefined;
  int graphStreamOrdering = kUndefined;
};

struct UniqueId {
  char bytes[128];
};

struct Operation {
  enum Kind : int {
    none,
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    send,
    recv,
    split,
    connect,
    begin,
    end
  };
  Kind kind = none;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t count = 0;
  int type = kInt8;
  int op = kSum;
  int root = 0;  // or the peer
  std::intptr_t stream = 0;
  std::vector<std::byte> factor;  // of a reduction that multiplies first
};

struct Communicator {
  Communicator(std::string name, int rank, int size, Config config)
      : name(std::move(name)), rank(rank), size(size), config(config), mesh(this->name, rank, size) {}

  // Tells the ranks each other's GPU and version, before there is an operation; throws Failure as NCCL
  // refuses.
  void begin();
  // Gives each rank the values of all, which has its own; false where an abort stopped it.
  template <class Value>
  bool exchange(Lane lane, Operation::Kind kind, std::vector<Value>& all) {
    std::vector<Outgoing> sends;
    std::vector<Incoming> receives;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const auto place = static_cast<std::size_t>(peer), own = static_cast<std::size_t>(rank);
      sends.push_back({peer, reinterpret_cast<const std::byte*>(&all[own]), sizeof(Value)});
      receives.push_back({peer, reinterpret_cast<std::byte*>(&all[place]), sizeof(Value)});
    }
    return mesh.exchange(lane, kind, sends, receives, aborted);
  }
  // Runs `work` when those before have run; returns whether it did, and was not stopped by an abort.
  bool in_turn(std::uint64_t turn, const std::function<bool()>& work);
  // Makes the connections that operations need and that are not there; blocks until the peers do so, too.
  // Returns what went wrong, with a status of kSuccess for nothing.
  Failure connect(const std::vector<Operation>& operations);
  // Whether operations need connections that are not there.
  bool lacks_connections(const std::vector<Operation>& operations);
  // Waits until nothing runs, or also until nothing is to run.
  void settle(bool all);
  // Notes what the operations so far come behind, and themselves; the end waits for it.
  void is_behind(const Clock& clock) {
    const std::lock_guard lock(mutex);
    join(operations_done, clock);
  }
  // Waits for operations, and for the peers, which have to finalise the communicator, too, unless they have
  // ended it. Does nothing the second time.
  void finalise();
  // Returns the reason of the asynchronous error.
  std::string failure() {
    const std::lock_guard lock(mutex);
    return reason;
  }

  const std::string name;
  const int rank;
  const int size;
  const Config config;
  std::atomic<bool> aborted{false};
  std::atomic<int> async_error{kSuccess};

  std::mutex mutex;
  std::string reason;  // of the asynchronous error
  std::condition_variable changed;
  std::uint64_t issued = 0;
  std::uint64_t turn = 0;
  bool running = false;
  std::uint64_t splits = 0;
  bool finalised = false;
  bool collectives_connected = false;
  std::set<std::pair<int, Operation::Kind>> connected;        // peers, for messages out or in
  std::map<int, std::pair<int, std::vector<std::byte>>> ops;  // type and factor by code
  int next_op = kBuiltInOps;
  Clock operations_done;

  Mesh mesh;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

struct Failing {
  int status;
  std::string text;
};

struct State {
  std::mutex mutex;
  std::map<std::string, int> delays;  // milliseconds of the next call of a function, by its name
  std::atomic<int> delayed{0};        // calls that are held up now
  std::map<const void*, CommunicatorPtr> communicators;
  std::map<std::string, Failing> failing;
  std::multiset<const void*> in_graphs;  // communicators that graphs hold operations of, once for each graph
  std::condition_variable graphs_changed;
  std::string last;  // operation that was called
  std::atomic<int> version{kVersion};
  std::atomic<long> gpu{0};  // that this process says it uses; 0 where each rank has one of its own
  std::atomic<bool> dry{false};
  std::atomic<int> misuses{0};
  std::atomic<int> launches{0};
  std::atomic<int> connecting{0};  // threads
};

struct Group {
  int depth = 0;
  int error = kSuccess;
  std::vector<std::pair<CommunicatorPtr, Operation>> operations;
  std::vector<CommunicatorPtr> aborts;
  std::vector<CommunicatorPtr> destroys;
};

State& state();

// Of the calling thread.
extern thread_local Group group;
extern thread_local std::string last_error;

// Notes an error of the calling thread; returns its status.
int fail(int status, const std::string& text);

// Returns the status that a test ordered for the next call of this function.
int ordered_failure(const char* function);

// Looks a communicator up; `status` is set where there is none.
CommunicatorPtr find(const char* function, const void* handle, int& status);

const void* keep(CommunicatorPtr communicator);

void forget(const CommunicatorPtr& communicator);

// Lets a graph hold operations of a communicator, which cannot end then, or lets the graph go.
void hold_in_graph(const void* handle, bool on);

// Ends communicators that were forgotten: those of one group of calls, or one. As NCCL, it stops all that are
// aborted, finalises those that are destroyed, all at once, and then frees memory, for which the device must
// have nothing to do for any other communicator.
void end(const std::vector<CommunicatorPtr>& aborted, const std::vector<CommunicatorPtr>& destroyed);

// Puts operations on their streams. A communicator's operations of one group start together: on the stream of
// the first, which waits for the other streams, and they for it. Blocks while they make connections, those of
// several communicators at once; returns a status.
int launch(const std::vector<std::pair<CommunicatorPtr, Operation>>& operations);

}  // namespace nccl_double
