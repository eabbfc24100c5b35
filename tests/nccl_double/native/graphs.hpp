// What is captured of streams, and graphs made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "streams.hpp"

namespace nccl_double {

// CUDA's modes of captures.
constexpr int kGlobal = 0;
constexpr int kThreadLocal = 1;
constexpr int kRelaxed = 2;

// CUDA's errors of captures.
constexpr int kNotPermitted = 800;    // cudaErrorNotPermitted
constexpr int kNotInCapture = 900;    // cudaErrorStreamCaptureUnsupported
constexpr int kInvalidated = 901;     // cudaErrorStreamCaptureInvalidated
constexpr int kUnmatched = 903;       // cudaErrorStreamCaptureUnmatched
constexpr int kUnjoined = 904;        // cudaErrorStreamCaptureUnjoined
constexpr int kCrossesCapture = 905;  // cudaErrorStreamCaptureIsolation
constexpr int kCapturedEvent = 907;   // cudaErrorCapturedEvent

struct Node {
  Prepare prepare;
  std::set<std::size_t> after;                                 // indices of nodes
  std::vector<std::pair<std::intptr_t, Accesses>> operations;  // and their sequences
};

// A capture under way, and the graph that it makes.
struct Graph {
  std::mutex mutex;
  std::vector<Node> nodes;
  std::intptr_t origin = 0;
  std::thread::id thread;
  int mode = 0;
  bool failed = false;
  bool ended = false;
  std::map<std::intptr_t, std::set<std::size_t>> reached;  // by stream, the last nodes that it is behind
  std::set<const void*> owners;
  std::optional<std::size_t> last_owned;  // node

  void add(std::intptr_t stream, Prepare prepare, const std::vector<const void*>& its_owners,
           const std::vector<Accesses>& operations) {
    const std::lock_guard lock(mutex);
    const std::size_t index = nodes.size();
    nodes.push_back({std::move(prepare), std::exchange(reached[stream], {index}), {}});
    for (const Accesses& one : operations) nodes.back().operations.emplace_back(new_sequence(), one);
    if (its_owners.empty()) return;
    if (last_owned) nodes.back().after.insert(*last_owned);
    owners.insert(its_owners.begin(), its_owners.end());
    last_owned = index;
  }
};

using GraphPtr = std::shared_ptr<Graph>;

// Returns the capture of a stream, if there is one.
GraphPtr capture_of(std::intptr_t stream);

// Captures a stream, too, until the capture ends.
void join_capture(std::intptr_t stream, const GraphPtr& graph);

// Lets a capture fail.
void break_off(const GraphPtr& graph);

}  // namespace nccl_double
