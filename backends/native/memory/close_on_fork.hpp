// Descriptors that a forked child must not hold, because a connection ends only when all its holders are
// gone: with a copy in a child that lives on, nobody would notice the parent's death.
#pragma once

namespace collectives {

// From now on a forked child closes it at once. Thread safe.
void close_on_fork(int descriptor);

// To be called before the descriptor is closed.
void cancel_close_on_fork(int descriptor) noexcept;

}  // namespace collectives
