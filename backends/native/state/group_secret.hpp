// The secret in the address of a leader's unix socket (bootstrap.cpp), which every follower shows first:
// whoever does not know it is dropped unanswered, and takes no rank by mistake. What keeps others out is the
// kernel's word on the user at the other end.
#pragma once

#include <cstddef>
#include <string>

namespace collectives {

inline constexpr std::size_t kGroupSecretCharacters = 32;

// A new one: hexadecimal digits.
std::string make_group_secret();

}  // namespace collectives
