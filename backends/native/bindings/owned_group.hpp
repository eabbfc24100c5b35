// What the bindings of the host group share: ownership across forks, and when Python's lock is given up.
#pragma once

#include <cstddef>

#include "bindings/host_task.hpp"
#include "bindings/interrupt.hpp"
#include "common/error.hpp"
#include "common/thread.hpp"
#include "engine/group.hpp"

namespace collectives {

using OwnedGroup = ForkAware<Group>;

inline Group& usable(OwnedGroup& group) {
  if (group.inherited()) [[unlikely]] {
    throw Error(ErrorKind::aborted,
                "this group belongs to the parent of this forked process; make a new group in the child");
  }
  collect_owners();
  return *group.operator->();
}

// Bytes that move in less time than Python takes to hand its lock over and back.
inline constexpr std::size_t kKeepLockBytes = 32 << 10;

// An operation on so many bytes that finds its peers waiting keeps Python's lock where that is quicker.
inline PythonInterrupt::Release release_for(std::size_t bytes) noexcept {
  return bytes <= kKeepLockBytes ? PythonInterrupt::Release::when_blocked : PythonInterrupt::Release::now;
}

}  // namespace collectives
