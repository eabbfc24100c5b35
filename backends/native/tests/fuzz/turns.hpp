// An input of a fuzz target as a list of turns: a number, a length, and so many bytes. What a number means is
// the target's. The last turn may be cut off.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace collectives {

template <class Take>
void for_each_turn(const std::uint8_t* data, std::size_t size, Take&& take) {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  while (input.size() >= 2) {
    const std::string_view bytes = input.substr(2, static_cast<unsigned char>(input[1]));
    take(static_cast<unsigned char>(input[0]), bytes);
    input.remove_prefix(2 + bytes.size());
  }
}

// The next bytes of a turn as a number, the lowest byte first; 0 for those that it lacks.
inline std::uint64_t take_number(std::string_view& bytes, std::size_t length) {
  std::uint64_t number = 0;
  const std::size_t known = std::min(length, bytes.size());
  for (std::size_t i = 0; i < known; ++i)
    number |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  bytes.remove_prefix(known);
  return number;
}

// Two bytes that say where, and what is to lie there, as far as there is room.
inline void overwrite(void* begin, std::size_t room, std::string_view bytes) {
  const std::size_t at = take_number(bytes, 2) % room;
  std::memcpy(static_cast<std::byte*>(begin) + at, bytes.data(), std::min(bytes.size(), room - at));
}

}  // namespace collectives
