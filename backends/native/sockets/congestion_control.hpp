// Which congestion control of the kernel a connection has.
//
// BBR sends by a timer of each connection, which costs more than sending itself where a machine has several,
// and lets short messages wait. What it is better at, long ways that lose packets, is not between machines of
// one room. So where the system's choice is BBR, connections begin with CUBIC, or else Reno, and those to
// machines that are a millisecond or more away go back to BBR. Any other choice of the system, as DCTCP,
// stays.
#pragma once

#include "memory/descriptor.hpp"

namespace collectives {

// Before the socket listens or connects: what BBR has once set up for a connection, a change does not undo.
void begin_without_bbr(const Descriptor& socket) noexcept;

// Once it is connected.
void return_to_bbr_where_far(const Descriptor& socket) noexcept;

}  // namespace collectives
