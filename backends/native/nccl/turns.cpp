#include "nccl/turns.hpp"

#include <algorithm>

namespace collectives {

std::optional<std::uint64_t> NcclTurns::begin(const Communicators& communicators, Clock::duration at_most) {
  const Clock::time_point until = Clock::now() + at_most;
  std::unique_lock lock(mutex_);
  ++waiting_;
  bool comes = true;
  while (comes) {
    const std::optional<Clock::time_point> at = passable_at(communicators);
    const Clock::time_point now = Clock::now();
    if (at && *at <= now) break;
    comes = now < until;
    if (comes) changed_.wait_until(lock, at ? std::min(*at, until) : until);
  }
  --waiting_;
  if (!comes) return std::nullopt;
  inside_.emplace(next_, Turn{std::this_thread::get_id(), communicators, Clock::now()});
  return next_++;
}

void NcclTurns::end(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  inside_.erase(number);
  if (waiting_ > 0) changed_.notify_all();
}

std::optional<NcclTurns::Clock::time_point> NcclTurns::passable_at(const Communicators& communicators) const {
  Clock::time_point at = Clock::time_point::min();
  for (const auto& [number, turn] : inside_) {
    if (turn.thread == std::this_thread::get_id()) continue;
    const bool shared = std::ranges::any_of(communicators, [&used = turn.communicators](const void* one) {
      return std::ranges::find(used, one) != used.end();
    });
    if (shared) return std::nullopt;
    at = std::max(at, turn.since + patience_);
  }
  return at;
}

}  // namespace collectives
