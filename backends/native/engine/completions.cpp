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
  const auto found = queues_.find(turn.queue);
  if (found == queues_.end() || found->second.turn != turn.number) return;
  (collective ? found->second.own : found->second.messages) += change;
}

void Completions::expect(std::uint64_t number, std::uint64_t group, bool collective) {
  const Turn parent = current_.turn;
  const std::uint64_t depth = parent.queue == 0 ? 0 : std::min((parent.queue & kDeepest) + 1, kDeepest);
  const Queue queue = group << kDepthBits | depth;
  const std::lock_guard lock(mutex_);
  if (!completions_
           .try_emplace(number, Completion{.queue = queue, .collective = collective, .parent = parent})
           .second ||
      !collective)
    return;
  queues_[queue].collectives.insert(number);
  count(parent, 1);
}

void Completions::push(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = completions_.find(number);
  if (found == completions_.end() || std::exchange(found->second.ended, true)) return;
  const Completion& completion = found->second;
  if (!completion.collective) {
    add_due(completion.queue, number);
    return;
  }
  QueueState& queue = queues_.at(completion.queue);
  if (queue.ended++ == 0) queue.ended_since = now_ns();
  add_ended(completion.queue, false);
  if (queue.ended > 0) wake_watcher();
}

void Completions::forget(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = completions_.find(number);
  if (found == completions_.end() || found->second.ended) return;
  const Completion completion = found->second;
  completions_.erase(found);
  if (!completion.collective) return;
  count(completion.parent, -1);
  queues_.at(completion.queue).collectives.erase(number);
  add_ended(completion.queue, false);
  forget_if_empty(completion.queue);
}

// Makes collectives due that have ended: `all` of them, or up to the first one that has not.
void Completions::add_ended(Queue name, bool all) {
  QueueState& queue = queues_.at(name);
  for (auto next = queue.collectives.begin(); next != queue.collectives.end();) {
    if (completions_.at(*next).ended) {
      add_due(name, *next);
      --queue.ended;
      next = queue.collectives.erase(next);
    } else if (all) {
      ++next;
    } else {
      return;
    }
  }
}

void Completions::add_due(Queue name, std::uint64_t number) {
  QueueState& queue = queues_[name];
  queue.due.push_back(number);
  if (queue.turn != 0) {
    wake_watcher();
  } else if (queue.due.size() == 1) {  // else it is ready already
    make_ready(name);
  }
}

void Completions::forget_if_empty(Queue name) {
  const auto found = queues_.find(name);
  const QueueState& queue = found->second;
  if (queue.turn == 0 && queue.due.empty() && queue.collectives.empty()) queues_.erase(found);
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
  const auto found = queues_.find(ended.turn.queue);
  if (found == queues_.end() || found->second.turn != ended.turn.number) return;  // the next began meanwhile
  found->second.turn = 0;
  if (!found->second.due.empty()) ready_.push_back(ended.turn.queue);  // for this thread, or a quicker one
  forget_if_empty(ended.turn.queue);
}

Completions::Taken Completions::take() {
  const Queue name = ready_.front();
  ready_.pop_front();
  QueueState& queue = queues_.at(name);
  const std::uint64_t number = queue.due.front();
  queue.due.pop_front();
  queue.turn = ++last_turn_;
  queue.thread = ::gettid();
  queue.own = 0;
  queue.messages = 0;
  queue.began = now_ns();
  queue.looked = 0;
  queue.sleeps.reset();
  const Completion completion = completions_.at(number);
  completions_.erase(number);
  current_ = {.turn = {name, queue.turn}, .parent = completion.collective ? completion.parent : Turn{}};
  if (any_held()) wake_watcher();
  return {number, idle_.empty()};
}

void Completions::make_ready(Queue queue) {
  ready_.push_back(queue);
  if (idle_.empty()) return;
  Worker& worker = *idle_.back();
  leave_idle(worker);
  worker.wakes.notify_one();
}

// Whether something is to begin, though only after something else.
bool Completions::is_held(const QueueState& queue) noexcept {
  return queue.ended > 0 || (queue.turn != 0 && !queue.due.empty());
}

bool Completions::any_held() const {
  return std::any_of(queues_.begin(), queues_.end(), [](const auto& queue) { return is_held(queue.second); });
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
  for (const auto& [name, queue] : queues_) {
    if (is_held(queue)) all.push_back({{name, queue.turn}, queue.thread, {}});
  }
  lock.unlock();
  for (Held& held : all) {
    if (held.turn.number != 0) held.sleeps = sleeps_of_thread(held.thread);
  }
  lock.lock();
  const Nanoseconds now = now_ns();
  for (const Held& held : all) {
    const auto found = queues_.find(held.turn.queue);
    if (found == queues_.end()) continue;
    QueueState& queue = found->second;
    if (queue.ended > 0 && now - queue.ended_since >= kLongestTurn) add_ended(held.turn.queue, true);
    if (queue.turn == 0 || queue.turn != held.turn.number || queue.due.empty()) continue;
    if (now - queue.looked < kLook) continue;
    queue.looked = now;
    const bool slept = queue.messages > 0 || (held.sleeps && held.sleeps == queue.sleeps);
    queue.sleeps = held.sleeps;
    if ((slept && queue.own == 0) || now - queue.began >= kLongestTurn) {
      queue.turn = 0;
      make_ready(held.turn.queue);
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
