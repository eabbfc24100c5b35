#include "engine/task.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "engine/completions.hpp"
#include "memory/futex.hpp"

namespace collectives {
namespace {

constexpr int kSpins = 100;

}  // namespace

std::uint64_t Task::next_id() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;  // only uniqueness matters
}

Task::Task(Opcode opcode, Owner owner) : id_(next_id()), opcode_(opcode), owner_(std::move(owner)) {}

std::string Task::describe() const {
  const std::uint64_t sequence = sequence_.load(std::memory_order_relaxed);
  const std::string name = name_of(opcode_);
  return sequence == 0 ? name + ", which earlier operations keep from beginning,"
                       : name + " number " + std::to_string(sequence);
}

ErrorDetails Task::awaited(const RankContext& context) const {
  ErrorDetails about{.operation = name_of(opcode_)};
  const std::uint64_t sequence = sequence_.load(std::memory_order_relaxed);
  if (sequence != 0) about.sequence = static_cast<std::int64_t>(sequence);
  context.add_blame(about);
  return about;
}

bool Task::wait(Nanoseconds deadline, Interrupt* interrupt) {
  for (int i = 0; i < kSpins; ++i) {
    if (finished()) return true;
    relax_processor();
  }
  const Completions::Wait counted(opcode_ != Opcode::none);
  // Acquire-release: a finisher that does not see the flag has not finished yet when the loop below looks.
  std::uint32_t state = state_.fetch_or(kWaited, std::memory_order_acq_rel) | kWaited;
  while ((state & kFinished) == 0) {
    const Nanoseconds now = now_ns();
    if (now >= deadline) return false;
    const bool undisturbed =
        futex_wait(state_, state, std::min(kLongestSleep, deadline - now), FutexScope::process);
    state = state_.load(std::memory_order_acquire);
    const bool look = interrupt != nullptr && (state & kFinished) == 0;
    if (look && (!undisturbed || now_ns() - now >= kLongestSleep / 2) && interrupt->requested()) {
      throw Error(ErrorKind::interrupted, "interrupted while waiting for an operation, which goes on");
    }
  }
  return true;
}

bool Task::mark_observed() noexcept {
  std::uint32_t state = state_.load(std::memory_order_acquire);
  // Acquire-release: whoever would undo it comes before, or finds the flag.
  if ((state & (kFinished | kObserved)) == kFinished) {
    state = state_.fetch_or(kObserved, std::memory_order_acq_rel);
  }
  return (state & kFinished) != 0;
}

bool Task::unfinish() noexcept {
  std::uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & (kFinished | kObserved | kNotify)) == kFinished) {
    // Acquire-release, for the same reason.
    if (state_.compare_exchange_weak(state, state & ~kFinished, std::memory_order_acq_rel,
                                     std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

void Task::notify(std::uint64_t group) {
  Completions::instance().expect(id_, group, !is_message());
  const std::uint32_t before = state_.fetch_or(kNotify, std::memory_order_acq_rel);
  if ((before & kFinished) != 0) Completions::instance().push(id_);
}

void Task::finish(std::optional<Error> error) {
  error_ = std::move(error);
  // Release for the outputs and the error; acquire for the flags. The task may be gone when others see this.
  const std::uint64_t id = id_;
  const std::uint32_t before = state_.fetch_or(kFinished, std::memory_order_acq_rel);
  if ((before & kWaited) != 0) futex_wake_all(state_, FutexScope::process);
  if ((before & kNotify) != 0) Completions::instance().push(id);
}

}  // namespace collectives
