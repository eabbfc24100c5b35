#include "graphs.hpp"

#include <algorithm>
#include <random>

#include "communicator.hpp"

namespace nccl_double {

namespace {

// Never destroyed: threads of streams may outlive the end of main.
struct Graphs {
  std::mutex mutex;
  std::map<std::intptr_t, GraphPtr> captured;  // by stream, the captures under way
  std::map<std::intptr_t, GraphPtr> made;
  std::intptr_t next = 0;
};

thread_local int capture_mode = kGlobal;

Graphs& graphs() {
  static auto* const all = new Graphs;
  return *all;
}

}  // namespace

GraphPtr capture_of(std::intptr_t stream) {
  const std::lock_guard lock(graphs().mutex);
  const auto found = graphs().captured.find(stream);
  return found == graphs().captured.end() ? nullptr : found->second;
}

void join_capture(std::intptr_t stream, const GraphPtr& graph) {
  const std::lock_guard lock(graphs().mutex);
  graphs().captured[stream] = graph;
}

void break_off(const GraphPtr& graph) {
  const std::lock_guard lock(graph->mutex);
  graph->failed = true;
}

int exchange_capture_mode(int mode) { return std::exchange(capture_mode, mode); }

bool forbidden_by_a_capture() {
  if (capture_mode == kRelaxed) return false;
  std::set<GraphPtr> found;
  {
    const std::lock_guard lock(graphs().mutex);
    for (const auto& [stream, graph] : graphs().captured) {
      const bool own = graph->thread == std::this_thread::get_id();
      if (own ? graph->mode != kRelaxed : graph->mode == kGlobal && capture_mode == kGlobal) {
        found.insert(graph);
      }
    }
  }
  for (const GraphPtr& one : found) break_off(one);
  return !found.empty();
}

bool is_captured(std::intptr_t stream, bool* error) {
  const GraphPtr graph = capture_of(stream);
  if (!graph) return false;
  const std::lock_guard lock(graph->mutex);
  if (error != nullptr) *error = graph->failed;
  return true;
}

void capture(std::intptr_t stream, Prepare prepare, const std::vector<const void*>& owners,
             const std::vector<Accesses>& operations) {
  if (const GraphPtr graph = capture_of(stream)) graph->add(stream, std::move(prepare), owners, operations);
}

}  // namespace nccl_double

using namespace nccl_double;

extern "C" {

// Begins to capture a stream, in a mode of CUDA's.
int double_capture_begin(std::intptr_t id, int mode) {
  if (id == 0 || !stream_exists(id)) return -1;
  if (capture_of(id)) return -kNotInCapture;
  const auto graph = std::make_shared<Graph>();
  graph->origin = id;
  graph->thread = std::this_thread::get_id();
  graph->mode = mode;
  const std::lock_guard lock(graphs().mutex);
  graphs().captured[id] = graph;
  return 0;
}

// Returns whether a stream is being captured.
int double_capturing(std::intptr_t id) {
  if (!stream_exists(id)) return -1;
  return is_captured(id);
}

// Ends a capture on the stream that it began on; returns the graph.
std::intptr_t double_capture_end(std::intptr_t id) {
  const GraphPtr graph = capture_of(id);
  if (!graph || graph->origin != id) return -kUnmatched;
  const std::scoped_lock lock(graphs().mutex, graph->mutex);
  std::erase_if(graphs().captured, [&](const auto& one) { return one.second == graph; });
  graph->ended = true;
  if (graph->failed) return -kInvalidated;
  // All is joined where the origin is behind every node, directly or by way of others.
  std::set<std::size_t> behind;
  std::vector<std::size_t> next(graph->reached[id].begin(), graph->reached[id].end());
  while (!next.empty()) {
    const std::size_t one = next.back();
    next.pop_back();
    if (!behind.insert(one).second) continue;
    next.insert(next.end(), graph->nodes[one].after.begin(), graph->nodes[one].after.end());
  }
  if (behind.size() != graph->nodes.size()) return -kUnjoined;
  for (const void* const owner : graph->owners) hold_in_graph(owner, true);
  graphs().made[++graphs().next] = graph;
  return graphs().next;
}

// Puts a graph on a stream: its nodes one after the other, in an order that their dependencies allow.
int double_graph_launch(std::intptr_t id, std::intptr_t stream) {
  GraphPtr graph;
  {
    const std::lock_guard lock(graphs().mutex);
    const auto found = graphs().made.find(id);
    if (found != graphs().made.end()) graph = found->second;
  }
  if (!graph || !stream_exists(stream)) return -1;
  if (is_captured(stream)) return -kNotInCapture;
  thread_local std::mt19937 random(1 + seed());
  const std::lock_guard lock(graph->mutex);
  std::vector<std::size_t> waits(graph->nodes.size());
  std::vector<std::vector<std::size_t>> before(graph->nodes.size());
  std::vector<std::size_t> ready;
  for (std::size_t node = 0; node < graph->nodes.size(); ++node) {
    waits[node] = graph->nodes[node].after.size();
    for (const std::size_t one : graph->nodes[node].after) before[one].push_back(node);
    if (waits[node] == 0) ready.push_back(node);
  }
  const Clock before_all = clock_of(stream);
  Clock behind_all = before_all;
  std::vector<Clock> behind(graph->nodes.size(), before_all);
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    const std::size_t node = ready.back();
    ready.pop_back();
    for (const std::size_t one : graph->nodes[node].after) join(behind[node], behind[one]);
    const Clock start = behind[node];
    Place last;
    for (const auto& [sequence, accesses] : graph->nodes[node].operations) {
      last = access_behind(start, sequence, accesses);
      join(behind[node], *last.clock);
    }
    enqueue(stream, graph->nodes[node].prepare(last));
    join(behind_all, behind[node]);
    for (const std::size_t next : before[node]) {
      if (--waits[next] == 0) ready.push_back(next);
    }
  }
  follow(stream, behind_all);
  return 0;
}

// Lets a graph go; what was launched is still carried out.
int double_graph_destroy(std::intptr_t id) {
  const std::lock_guard lock(graphs().mutex);
  const auto found = graphs().made.find(id);
  if (found == graphs().made.end()) return -1;
  for (const void* const owner : found->second->owners) hold_in_graph(owner, false);
  graphs().made.erase(found);
  return 0;
}

}  // extern "C"
