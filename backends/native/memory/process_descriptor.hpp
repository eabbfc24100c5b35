// The descriptor of another process (a pidfd), of which this process keeps one for all its groups.
#pragma once

#include <memory>

#include "memory/descriptor.hpp"

namespace collectives {

using ProcessDescriptor = std::shared_ptr<const Descriptor>;

// Takes a descriptor that another process sent. Returns the one that this process has already for the same
// process, if any, and closes the new one then; empty for an empty one.
ProcessDescriptor share_process(Descriptor process);

}  // namespace collectives
