#include "common/opcode.hpp"

#include <cstddef>
#include <iterator>

namespace collectives {

const char* name_of(Opcode opcode) noexcept {
  constexpr const char* kNames[] = {"none",       "barrier",        "broadcast", "all_reduce", "reduce",
                                    "all_gather", "reduce_scatter", "gather",    "scatter",    "all_to_all"};
  const auto code = static_cast<std::size_t>(opcode);
  return code < std::size(kNames) ? kNames[code] : "unknown";
}

bool reduces(Opcode opcode) noexcept {
  return opcode == Opcode::all_reduce || opcode == Opcode::reduce || opcode == Opcode::reduce_scatter;
}

bool rooted(Opcode opcode) noexcept {
  return opcode == Opcode::broadcast || opcode == Opcode::reduce || opcode == Opcode::gather ||
         opcode == Opcode::scatter;
}

}  // namespace collectives
