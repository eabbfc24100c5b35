// Runs the callbacks of futures: on which thread, and when. A callback may wait for other operations and for
// their callbacks.
//
// Completions of a queue come one after the other: those of collectives in the order of issue, as on all
// other ranks, the rest in the order in which their operations ended. Those of different queues come at the
// same time, on different threads. There is a queue for each group and depth: a completion that is asked for
// within another one is one deeper, so that the other may wait for it. The next one of a queue begins early
// if the one before may wait for it: if that sleeps and waits for no collective of its own, or takes seconds.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "common/clock.hpp"

namespace collectives {

// Thread safe.
class Completions {
 public:
  // The one of the process. Lives as long as the process, so that no thread can outlive it.
  static Completions& instance();

  // Announces a completion by a number that is unique in the process, and for a collective one of the order
  // of issue, at the depth of the calling thread. `group` stands for its group.
  void expect(std::uint64_t number, std::uint64_t group, bool collective);
  // The operation has ended.
  void push(std::uint64_t number);
  // It never will.
  void forget(std::uint64_t number);

  struct Taken {
    std::uint64_t number = 0;
    bool by_last = false;  // no other thread is left to take the next
  };
  // The calling thread is done with what it took before, and takes the next. Nothing where nothing is due.
  std::optional<Taken> poll();
  // Blocks until there is one. Nothing where the thread is to end: after `close`, or as one of many that have
  // been idle for long.
  std::optional<Taken> pop();
  // What is due is still taken, then every `pop` returns nothing.
  void close();

  // Tells that the calling thread waits for a collective, or a message, where it does so within a completion.
  class Wait {
   public:
    explicit Wait(bool collective) : collective_(collective), counts_(current_.turn.queue != 0) {
      if (counts_) count(1);
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;
    ~Wait() {
      if (counts_) count(-1);
    }

   private:
    void count(int change) const;
    const bool collective_;
    const bool counts_;
  };

 private:
  using Queue = std::uint64_t;
  struct Turn {
    Queue queue = 0;  // 0 for none
    std::uint64_t number = 0;
  };
  struct Completion {
    Queue queue = 0;
    bool collective = false;
    bool ended = false;
    Turn parent;  // in which it was asked for
  };
  // What a thread is at.
  struct Current {
    Turn turn;
    Turn parent;
  };
  struct QueueState {
    std::set<std::uint64_t> collectives;  // not due, in the order of issue
    int ended = 0;                        // of these
    Nanoseconds ended_since = 0;
    std::deque<std::uint64_t> due;
    std::uint64_t turn = 0;  // in progress, else 0
    pid_t thread = 0;
    int own = 0;       // collectives that the turn waits for, or may: asked for in it, and not completed
    int messages = 0;  // that it waits for
    Nanoseconds began = 0;
    Nanoseconds looked = 0;               // when somebody last looked at the thread
    std::optional<std::uint64_t> sleeps;  // how often it had fallen asleep then, if it slept
  };
  struct Worker {
    std::condition_variable wakes;
    bool idle = false;
  };

  void count(Turn turn, int change, bool collective = true);
  void add_due(Queue queue, std::uint64_t number);
  void add_ended(Queue queue, bool all);
  void forget_if_empty(Queue queue);
  void end_turn();
  Taken take();
  void make_ready(Queue queue);
  static bool is_held(const QueueState& queue) noexcept;
  bool any_held() const;
  void wake_watcher();
  void look(std::unique_lock<std::mutex>& lock);
  bool is_surplus(const Worker& worker) const;
  void leave_idle(Worker& worker);

  static constinit thread_local Current current_;

  std::mutex mutex_;
  std::unordered_map<std::uint64_t, Completion> completions_;  // not begun
  std::unordered_map<Queue, QueueState> queues_;  // of which something is expected, due or in progress
  std::deque<Queue> ready_;                       // of which something is due and nothing in progress
  std::vector<Worker*> idle_;                     // the last to come is the first to go
  Worker* watcher_ = nullptr;                     // the idle one that looks at queues whose next has to wait
  std::uint64_t last_turn_ = 0;
  bool closed_ = false;
};

}  // namespace collectives
