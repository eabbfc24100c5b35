#include "nccl/calls.hpp"

#include <algorithm>
#include <utility>

namespace collectives {

bool NcclCalls::enter() {
  const std::lock_guard lock(mutex_);
  if (end() != End::none) return false;
  ++inside_;
  return true;
}

void NcclCalls::leave() {
  const std::lock_guard lock(mutex_);
  --inside_;
  if (end() != End::none) changed_.notify_all();
}

bool NcclCalls::close(End end, int own, std::optional<Seconds> patience) {
  std::unique_lock lock(mutex_);
  if (end_ == End::aborted || end_ == end) return false;
  end_ = end;
  changed_.notify_all();
  const auto over = [&] { return inside_ <= own || end_ != end; };
  if (patience) {
    changed_.wait_for(lock, *patience, over);
  } else {
    changed_.wait(lock, over);
  }
  if (end_ != end || taken_) return false;
  taken_ = true;
  return true;
}

NcclOpenGroups& NcclOpenGroups::of_this_thread() {
  thread_local NcclOpenGroups groups;
  return groups;
}

void NcclOpenGroups::closed() {
  depth_ = std::max(0, depth_ - 1);
  if (depth_ > 0) return;
  for (const std::shared_ptr<NcclCalls>& calls : std::exchange(noted_, {})) calls->leave();
}

NcclOpenGroups::Entry NcclOpenGroups::enter(const std::shared_ptr<NcclCalls>& calls) {
  if (noted(*calls) > 0 && calls->end() == NcclCalls::End::none) return Entry::noted;
  if (!calls->enter()) return Entry::refused;
  if (!any()) return Entry::call;
  noted_.push_back(calls);
  return Entry::noted;
}

int NcclOpenGroups::noted(const NcclCalls& calls) const {
  return static_cast<int>(
      std::count_if(noted_.begin(), noted_.end(), [&](const auto& one) { return one.get() == &calls; }));
}

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
