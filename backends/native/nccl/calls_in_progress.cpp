#include "nccl/calls_in_progress.hpp"

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

}  // namespace collectives
