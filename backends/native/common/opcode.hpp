// Collective operations by the codes that ranks exchange, and their names in messages.
#pragma once

#include <cstdint>

namespace collectives {

// A code never changes its meaning; new ones are added at the end.
enum class Opcode : std::uint8_t {
  none = 0,
  barrier = 1,
  broadcast = 2,
  all_reduce = 3,
  reduce = 4,
  all_gather = 5,
  reduce_scatter = 6,
  gather = 7,
  scatter = 8,
  all_to_all = 9,
};

const char* name_of(Opcode opcode) noexcept;

// Whether its ranks must name a reduction, or a root.
bool reduces(Opcode opcode) noexcept;
bool rooted(Opcode opcode) noexcept;

}  // namespace collectives
