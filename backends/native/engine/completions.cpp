#include "engine/completions.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include "common/thread.hpp"

namespace collectives {
namespace {

constexpr Nanoseconds kLook = 10 * kMillisecond;  // a thread that waits for Python's GIL wakes every 5 ms
constexpr Nanoseconds kLongestTurn = 5 * kSecond;
constexpr std::chrono::seconds kLongestIdle{10};
constexpr std::size_t kKept = 2;  // one takes what is due next, the other what is due meanwhile

constexpr int kDepthBits = 16;
constexpr std::uint64_t kDeepest = (std::uint64_t{1} << kDepthBits) - 1;

}  // namespace

constinit thread_local Completions::Current Completions::current_;

Completions& Completions::instance() {
  // Never destroyed, so that no thread can outlive it. A forked child starts with a new one.
  static Completions* completions = new Completions();
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { completions = new Completions(); });
  static_cast<void>(registered);
  return *completions;
}

void Completions::Wait::count(int change) const {
  Completions& completions = instance();
  const std::lock_guard lock(completions.mutex_);
  completions.count(current_.turn, change, collective_);
}

void Completions::count(Turn turn, int change, bool collective) {
  const auto found = lanes_.find(turn.lane);
  if (found == lanes_.end() || found->second.turn != turn.number) return;
  (collective ? found->second.own : found->second.messages) += change;
}

void Completions::expect(std::uint64_t number, std::uint64_t group, bool collective) {
  const Turn parent = current_.turn;
  const std::uint64_t depth = parent.lane == 0 ? 0 : std::min((parent.lane & kDeepest) + 1, kDeepest);
  const Lane lane = group << kDepthBits | depth;
  const std::lock_guard lock(mutex_);
  if (!completions_.try_emplace(number, Completion{.lane = lane, .collective = collective, .parent = parent})
           .second ||
      !collective)
    return;
  lanes_[lane].collectives.insert(number);
  count(parent, 1);
}

void Completions::push(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = completions_.find(number);
  if (found == completions_.end() || std::exchange(found->second.ended, true)) return;
  const Completion& completion = found->second;
  if (!completion.collective) {
    add_due(completion.lane, number);
    return;
  }
  LaneState& lane = lanes_.at(completion.lane);
  if (lane.ended++ == 0) lane.ended_since = now_ns();
  add_ended(completion.lane, false);
  if (lane.ended > 0) wake_watcher();
}

void Completions::forget(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = completions_.find(number);
  if (found == completions_.end() || found->second.ended) return;
  const Completion completion = found->second;
  completions_.erase(found);
  if (!completion.collective) return;
  count(completion.parent, -1);
  lanes_.at(completion.lane).collectives.erase(number);
  add_ended(completion.lane, false);
  forget_if_empty(completion.lane);
}

// Makes collectives due that have ended: `all` of them, or up to the first one that has not.
void Completions::add_ended(Lane name, bool all) {
  LaneState& lane = lanes_.at(name);
  for (auto next = lane.collectives.begin(); next != lane.collectives.end();) {
    if (completions_.at(*next).ended) {
      add_due(name, *next);
      --lane.ended;
      next = lane.collectives.erase(next);
    } else if (all) {
      ++next;
    } else {
      return;
    }
  }
}

void Completions::add_due(Lane name, std::uint64_t number) {
  LaneState& lane = lanes_[name];
  lane.due.push_back(number);
  if (lane.turn != 0) {
    wake_watcher();
  } else if (lane.due.size() == 1) {  // else it is ready already
    make_ready(name);
  }
}

void Completions::forget_if_empty(Lane name) {
  const auto found = lanes_.find(name);
  const LaneState& lane = found->second;
  if (lane.turn == 0 && lane.due.empty() && lane.collectives.empty()) lanes_.erase(found);
}

std::optional<Completions::Taken> Completions::poll() {
  const std::lock_guard lock(mutex_);
  end_turn();
  return ready_.empty() ? std::nullopt : std::optional(take());
}

std::optional<Completions::Taken> Completions::pop() {
  thread_local Worker worker;
  std::unique_lock lock(mutex_);
  end_turn();
  while (ready_.empty() && !closed_) {
    if (!worker.idle) {
      idle_.push_back(&worker);
      worker.idle = true;
    }
    if (watcher_ == nullptr && any_held()) {
      watcher_ = &worker;
      look(lock);
      if (ready_.empty() && !closed_) worker.wakes.wait_for(lock, std::chrono::nanoseconds(kLook));
      watcher_ = nullptr;
    } else if (!is_surplus(worker)) {
      worker.wakes.wait(lock);
    } else if (worker.wakes.wait_for(lock, kLongestIdle) == std::cv_status::timeout && is_surplus(worker)) {
      break;
    }
  }
  leave_idle(worker);
  return ready_.empty() ? std::nullopt : std::optional(take());
}

void Completions::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (Worker* worker : idle_) worker->wakes.notify_one();
}

void Completions::end_turn() {
  const Current ended = std::exchange(current_, {});
  count(ended.parent, -1);
  const auto found = lanes_.find(ended.turn.lane);
  if (found == lanes_.end() || found->second.turn != ended.turn.number) return;  // the next began meanwhile
  found->second.turn = 0;
  if (!found->second.due.empty()) ready_.push_back(ended.turn.lane);  // for this thread, or a quicker one
  forget_if_empty(ended.turn.lane);
}

Completions::Taken Completions::take() {
  const Lane name = ready_.front();
  ready_.pop_front();
  LaneState& lane = lanes_.at(name);
  const std::uint64_t number = lane.due.front();
  lane.due.pop_front();
  lane.turn = ++last_turn_;
  lane.thread = ::gettid();
  lane.own = 0;
  lane.messages = 0;
  lane.began = now_ns();
  lane.looked = 0;
  lane.sleeps.reset();
  const Completion completion = completions_.at(number);
  completions_.erase(number);
  current_ = {.turn = {name, lane.turn}, .parent = completion.collective ? completion.parent : Turn{}};
  if (any_held()) wake_watcher();
  return {number, idle_.empty()};
}

void Completions::make_ready(Lane lane) {
  ready_.push_back(lane);
  if (idle_.empty()) return;
  Worker& worker = *idle_.back();
  leave_idle(worker);
  worker.wakes.notify_one();
}

// Whether something is to begin, though only after something else.
bool Completions::is_held(const LaneState& lane) noexcept {
  return lane.ended > 0 || (lane.turn != 0 && !lane.due.empty());
}

bool Completions::any_held() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return is_held(lane.second); });
}

void Completions::wake_watcher() {
  if (watcher_ == nullptr && !idle_.empty()) idle_.front()->wakes.notify_one();
}

void Completions::look(std::unique_lock<std::mutex>& lock) {
  struct Held {
    Turn turn;
    pid_t thread;
    std::optional<std::uint64_t> sleeps;
  };
  std::vector<Held> all;
  for (const auto& [name, lane] : lanes_) {
    if (is_held(lane)) all.push_back({{name, lane.turn}, lane.thread, {}});
  }
  lock.unlock();
  for (Held& held : all) {
    if (held.turn.number != 0) held.sleeps = sleeps_of_thread(held.thread);
  }
  lock.lock();
  const Nanoseconds now = now_ns();
  for (const Held& held : all) {
    const auto found = lanes_.find(held.turn.lane);
    if (found == lanes_.end()) continue;
    LaneState& lane = found->second;
    if (lane.ended > 0 && now - lane.ended_since >= kLongestTurn) add_ended(held.turn.lane, true);
    if (lane.turn == 0 || lane.turn != held.turn.number || lane.due.empty()) continue;
    if (now - lane.looked < kLook) continue;
    lane.looked = now;
    const bool slept = lane.messages > 0 || (held.sleeps && held.sleeps == lane.sleeps);
    lane.sleeps = held.sleeps;
    if ((slept && lane.own == 0) || now - lane.began >= kLongestTurn) {
      lane.turn = 0;
      make_ready(held.turn.lane);
    }
  }
}

bool Completions::is_surplus(const Worker& worker) const {
  return std::find(idle_.begin(), idle_.end(), &worker) - idle_.begin() >= static_cast<std::ptrdiff_t>(kKept);
}

void Completions::leave_idle(Worker& worker) {
  if (!worker.idle) return;
  idle_.erase(std::find(idle_.begin(), idle_.end(), &worker));
  worker.idle = false;
}

}  // namespace collectives
