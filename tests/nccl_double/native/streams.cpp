#include "streams.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "graphs.hpp"

namespace nccl_double {

// Whether a stream has got to a place that was noted in it.
class Passage {
 public:
  void pass() {
    const std::lock_guard lock(mutex_);
    passed_ = true;
    changed_.notify_all();
  }
  bool passed() {
    const std::lock_guard lock(mutex_);
    return passed_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return passed_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
};

class Event {
 public:
  // A place in a stream, with its clock; where it was noted in a capture that, and the nodes before it. Who
  // waits for the place keeps its passage: the event may be noted elsewhere meanwhile, and passed there.
  struct Noted {
    std::shared_ptr<Passage> passage;  // none where nothing was noted in a stream
    Clock clock;
    GraphPtr graph;
    std::set<std::size_t> after;
  };

  void capture(const GraphPtr& graph, std::set<std::size_t> after) {
    const std::lock_guard lock(mutex_);
    noted_.graph = graph;
    noted_.after = std::move(after);
  }
  std::shared_ptr<Passage> note(Clock clock) {
    const std::lock_guard lock(mutex_);
    noted_ = {std::make_shared<Passage>(), std::move(clock), nullptr, {}};
    return noted_.passage;
  }
  Noted noted() {
    const std::lock_guard lock(mutex_);
    return noted_;
  }

 private:
  std::mutex mutex_;
  Noted noted_;
};

namespace {

thread_local int current_device = 0;
std::atomic<unsigned> contexts{0};
std::atomic<int> holds{0};

// Decides for one stream how long to hold it before its next task: in most cases not at all.
class Holds {
 public:
  explicit Holds(unsigned stream) : random_(seed() + stream) {}

  void hold() {
    constexpr unsigned kTasks = 64;  // of these, one is held for long and a few for a moment
    constexpr unsigned kMoments = 8;
    constexpr unsigned kLong = 20000, kMoment = 2000;  // microseconds at most
    if (seed() == 0) return;
    const unsigned drawn = static_cast<unsigned>(random_()) % kTasks;
    if (drawn >= kMoments) return;
    ++holds;
    const unsigned most = drawn == 0 ? kLong : kMoment;
    std::this_thread::sleep_for(std::chrono::microseconds(static_cast<unsigned>(random_()) % most));
  }

 private:
  std::mt19937 random_;
};

class Stream {
 public:
  explicit Stream(unsigned number) : holds_(number) {}

  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  // Waits until there is nothing to do.
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty() && !busy_; });
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      busy_ = false;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      holds_.hold();
      task();
      lock.lock();
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
  Holds holds_;
};

// Never destroyed: threads of streams may outlive the end of main.
struct Registry {
  std::mutex mutex;
  std::map<std::intptr_t, std::shared_ptr<Stream>> streams;
  std::map<std::intptr_t, std::shared_ptr<Event>> events;
  std::intptr_t next = 0x1000;
  unsigned streams_made = 0;
};

Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

std::shared_ptr<Stream> stream_of(std::intptr_t id) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().streams.find(id);
  return found == registry().streams.end() ? nullptr : found->second;
}

std::shared_ptr<Event> event_of(std::intptr_t id) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().events.find(id);
  return found == registry().events.end() ? nullptr : found->second;
}

// Where the task is that this thread carries out.
thread_local Place current_place;

std::function<void()> at_place(const Place& place, std::function<void()> task) {
  return [place, task = std::move(task)] {
    const Place before = std::exchange(current_place, place);
    task();
    current_place = before;
  };
}

}  // namespace

unsigned seed() {
  static const unsigned given = [] {
    const char* const text = std::getenv("COLLECTIVES_TEST_STREAMS_SEED");
    return text == nullptr ? 0U : static_cast<unsigned>(std::atoi(text));
  }();
  return given;
}

void use_device() { contexts |= 1U << current_device; }

bool stream_exists(std::intptr_t stream) { return stream == 0 || stream_of(stream) != nullptr; }

void enqueue(std::intptr_t stream, std::function<void()> task, const std::vector<Accesses>& operations) {
  if (stream == 0) {
    at_place(access(0, operations), task)();
  } else if (is_captured(stream)) {
    capture(
        stream, [task = std::move(task)](const Place& place) { return at_place(place, task); }, {},
        operations);
  } else if (const auto found = stream_of(stream)) {
    found->add(at_place(access(stream, operations), std::move(task)));
  }
}

std::shared_ptr<Event> make_event() { return std::make_shared<Event>(); }

void record(const std::shared_ptr<Event>& event, std::intptr_t stream) {
  if (const GraphPtr graph = capture_of(stream)) {
    const std::lock_guard lock(graph->mutex);
    event->capture(graph, graph->reached[stream]);
    return;
  }
  enqueue(stream, [passage = event->note(clock_of(stream))] { passage->pass(); });
}

bool await(const std::shared_ptr<Event>& event, std::intptr_t stream) {
  const GraphPtr graph = capture_of(stream);
  const Event::Noted noted = event->noted();
  if (!graph && !noted.graph) {
    follow(stream, noted.clock);
    enqueue(stream, [passage = noted.passage] {
      if (passage) passage->wait();
    });
    return true;
  }
  if (const GraphPtr& other = noted.graph) {
    const std::lock_guard lock(other->mutex);
    if (!other->ended && (!graph || graph == other)) {
      other->reached[stream].insert(noted.after.begin(), noted.after.end());
      join_capture(stream, other);
      return true;
    }
  } else if (!noted.passage) {
    return true;  // noted nowhere: there is nothing to wait for
  }
  for (const GraphPtr& one : {graph, noted.graph}) {
    if (one && !one->ended) break_off(one);
  }
  return false;
}

}  // namespace nccl_double

using namespace nccl_double;

// The functions that tests call. They return 0 or more, -1 for a stream, event or graph that does not exist,
// and the negative number of an error of CUDA.
extern "C" {

// Changes the calling thread's device; returns the one before.
int double_set_device(int device) { return std::exchange(current_device, device); }

// Returns the devices with a context, a bit for each.
int double_contexts() { return static_cast<int>(contexts.load()); }

std::intptr_t double_stream_create() {
  const std::lock_guard lock(registry().mutex);
  const auto stream = std::make_shared<Stream>(++registry().streams_made);
  std::thread([stream] { stream->run(); }).detach();
  registry().streams[++registry().next] = stream;
  return registry().next;
}

// Returns how often a stream was held before a task.
int double_holds() { return holds; }

int double_stream_synchronize(std::intptr_t id) {
  if (!stream_exists(id)) return -1;
  if (const GraphPtr graph = capture_of(id)) {
    break_off(graph);
    return -kNotInCapture;
  }
  if (forbidden_by_a_capture()) return -kNotInCapture;
  if (refuses_to_wait()) return -kNotPermitted;
  const Clock clock = clock_of(id);
  if (const auto stream = stream_of(id)) stream->synchronize();
  follow(0, clock);
  return 0;
}

// Waits as double_stream_synchronize does, where the device would not: nothing is ordered by it.
int double_stream_settle(std::intptr_t id) {
  if (!stream_exists(id)) return -1;
  if (const auto stream = stream_of(id)) stream->synchronize();
  return 0;
}

// Adds a task that sleeps.
int double_stream_sleep(std::intptr_t id, int milliseconds) {
  if (!stream_exists(id)) return -1;
  enqueue(id, [milliseconds] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  return 0;
}

// Adds a task that calls a function of the host, which stands for an operation that accesses `count` ranges.
int double_stream_call(std::intptr_t id, void (*function)(void*), void* argument, const char* what,
                       const Range* ranges, std::size_t count) {
  if (!stream_exists(id)) return -1;
  enqueue(id, [=] { function(argument); }, {{what, {ranges, ranges + count}}});
  return 0;
}

// Notes more accesses of the operation that the calling function of double_stream_call is part of.
int double_access_more(const char* what, const Range* ranges, std::size_t count) {
  access_at(current_place, {what, {ranges, ranges + count}});
  return 0;
}

// Notes the accesses of an operation of the stream that the caller carries out.
int double_access(std::intptr_t id, const char* what, const Range* ranges, std::size_t count) {
  if (!stream_exists(id)) return -1;
  access(id, {{what, {ranges, ranges + count}}});
  return 0;
}

// Forgets the accesses to memory that has been given out anew.
int double_forget_accesses(std::uintptr_t begin, std::uintptr_t end) {
  forget_accesses(begin, end);
  return 0;
}

// Notes that the caller has given memory back; see give_back in races.hpp.
int double_give_back(const std::intptr_t* streams, std::size_t count, const char* what, std::uintptr_t begin,
                     std::uintptr_t end) {
  give_back({streams, streams + count}, {what, {{begin, end, true}}});
  return 0;
}

// Begins to look for races, or ends it.
int double_watch_accesses(int on) {
  watch_accesses(on != 0);
  return 0;
}

// Returns the races that were found since the last call, in lines.
const char* double_races() {
  thread_local std::string text;
  text = take_races();
  return text.c_str();
}

std::intptr_t double_event_create() {
  const std::lock_guard lock(registry().mutex);
  registry().events[++registry().next] = make_event();
  return registry().next;
}

int double_event_record(std::intptr_t id, std::intptr_t stream) {
  const auto event = event_of(id);
  if (!event || !stream_exists(stream)) return -1;
  record(event, stream);
  return 0;
}

// Lets the stream wait for the event; stream 0 waits in the caller.
int double_event_wait(std::intptr_t id, std::intptr_t stream) {
  const auto event = event_of(id);
  if (!event || !stream_exists(stream)) return -1;
  return await(event, stream) ? 0 : -kCrossesCapture;
}

// Returns 1 when the noted place has been passed, or none was noted, and 0 before.
int double_event_query(std::intptr_t id) {
  use_device();
  const auto event = event_of(id);
  if (!event) return -1;
  const Event::Noted noted = event->noted();
  if (noted.graph) return -kCapturedEvent;
  if (noted.passage && !noted.passage->passed()) return 0;
  follow(0, noted.clock);
  return 1;
}

// Lets all threads know that the noted place has been passed.
int double_event_tell(std::intptr_t id) {
  const auto event = event_of(id);
  if (!event) return -1;
  follow_everywhere(event->noted().clock);
  return 0;
}

int double_event_synchronize(std::intptr_t id) {
  const auto event = event_of(id);
  if (!event) return -1;
  const Event::Noted noted = event->noted();
  if (noted.graph) return -kCapturedEvent;
  if (noted.passage) noted.passage->wait();
  follow(0, noted.clock);
  return 0;
}

}  // extern "C"
