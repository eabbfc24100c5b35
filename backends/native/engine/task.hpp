// An operation that outlives the call that issued it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/clock.hpp"
#include "common/codes.hpp"
#include "common/error.hpp"
#include "common/thread.hpp"
#include "state/rank_context.hpp"

namespace collectives {

// What the memory of an operation belongs to.
//
// The core knows tensors by their addresses alone. Whoever issues an operation that outlives the call gives
// it an owner, which keeps the memory until the operation is over and everybody has let go of it. The last
// one may be any thread of the core, with any lock: `let_go` only sets the object aside.
class Owner {
 public:
  using LetGo = void (*)(void*) noexcept;

  Owner() = default;
  Owner(void* object, LetGo let_go) noexcept : object_(object), let_go_(let_go) {}
  Owner(Owner&& other) noexcept : object_(other.take()), let_go_(other.let_go_) {}
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  Owner& operator=(Owner&&) = delete;
  ~Owner() {
    if (void* const object = take()) let_go_(object);
  }

  // The object, for whoever can let go of it better; null for all but the first. The operation must be over.
  void* take() noexcept {
    // Relaxed where it is gone: there is nothing to order. Acquire-release where several ask at once.
    if (object_.load(std::memory_order_relaxed) == nullptr) return nullptr;
    return object_.exchange(nullptr, std::memory_order_acq_rel);
  }

 private:
  std::atomic<void*> object_{nullptr};
  LetGo let_go_ = nullptr;
};

// Pending, then done or failed. Thread safe.
class Task {
 public:
  explicit Task(Opcode opcode, Owner owner = {});
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  // Unique in the process, in the order of issue; also among the completions of other operations.
  std::uint64_t id() const noexcept { return id_; }
  static std::uint64_t next_id() noexcept;

  // A send or a receive, else a collective.
  bool is_message() const noexcept { return opcode_ == Opcode::none; }

  // Acquire: where it is true, the outputs are readable.
  bool finished() const noexcept { return (state_.load(std::memory_order_acquire) & kFinished) != 0; }
  // The same for whoever has issued it, which cannot be undone afterwards.
  virtual bool observe() noexcept { return finished(); }
  // The error of a failed task, or null. Only for a finished task.
  const Error* error() const noexcept { return error_ ? &*error_ : nullptr; }
  // "all_reduce number 7".
  virtual std::string describe() const;
  // The same for programs, with the ranks that hold it up.
  virtual ErrorDetails awaited(const RankContext& context) const;
  // Whether this is a forked child, in which nobody carries out what its parent had begun.
  bool inherited() const noexcept { return generation_ != fork_generation(); }
  // Sender of a finished receive, else -1.
  virtual int source() const noexcept { return -1; }

  // What its memory belongs to, for a thread that can let go of it at once; null where somebody has taken it.
  // Only of a finished task.
  void* take_owner() noexcept { return owner_.take(); }

  // Helps it on where that is possible from the calling thread; does not block.
  virtual void poll() {}

  // For a caller of `wait` that raises, though that has returned true, or was about to be called: as where it
  // is interrupted.
  virtual void rest() {}
  // The same for a caller that has given it to nobody.
  virtual void undo() {}
  // Nobody will ask for it any more. It goes on, as peers count on it, but for a receive and what rests.
  virtual void abandon() {}

  // Blocks until it is finished or the deadline passed; returns whether it is finished. Throws
  // ErrorKind::interrupted where the hook asks for it; a collective goes on then, a transfer as Messenger
  // says.
  virtual bool wait(Nanoseconds deadline, Interrupt* interrupt);

  // Asks for a completion under its id; see `Completions`. `group` stands for its group.
  void notify(std::uint64_t group);
  // Whether somebody has.
  bool notifies() const noexcept { return (state_.load(std::memory_order_relaxed) & kNotify) != 0; }

  // Both once, by whoever executes it. `sequence`: its number among the collectives of the group.
  void begin(std::uint64_t sequence) noexcept { sequence_.store(sequence, std::memory_order_relaxed); }
  void finish(std::optional<Error> error);

 protected:
  bool mark_observed() noexcept;
  // Returns false where somebody has observed that it is finished, or will.
  bool unfinish() noexcept;

 private:
  static constexpr std::uint32_t kFinished = 1;
  static constexpr std::uint32_t kNotify = 2;
  static constexpr std::uint32_t kWaited = 4;
  static constexpr std::uint32_t kObserved = 8;

  const std::uint64_t id_;
  const Opcode opcode_;
  const unsigned generation_ = fork_generation();
  std::atomic<std::uint64_t> sequence_{0};  // 0 before it begins; relaxed, only for messages
  // Flags. The finisher sets its own with release of outputs and error, and acquire, so that it finds what
  // was asked for before; whoever asks does so with acquire-release, and finds it finished otherwise.
  std::atomic<std::uint32_t> state_{0};
  std::optional<Error> error_;
  Owner owner_;
};

}  // namespace collectives
