#include "common/operation.hpp"

#include <cstddef>
#include <iterator>

namespace collectives {

const char* name_of(Kind kind) noexcept {
  constexpr const char* kNames[] = {"none",       "barrier",        "broadcast", "all_reduce", "reduce",
                                    "all_gather", "reduce_scatter", "gather",    "scatter",    "all_to_all"};
  const auto code = static_cast<std::size_t>(kind);
  return code < std::size(kNames) ? kNames[code] : "unknown";
}

bool reduces(Kind kind) noexcept {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

bool rooted(Kind kind) noexcept {
  return kind == Kind::broadcast || kind == Kind::reduce || kind == Kind::gather || kind == Kind::scatter;
}

}  // namespace collectives
