// The secret in the address of a leader's unix socket (state/bootstrap.cpp), which every follower shows
// first: whoever does not know it is dropped unanswered, and takes no rank by mistake. What keeps others out
// is the kernel's word on the user at the other end.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace collectives {

inline constexpr std::size_t kGroupSecretCharacters = 32;

// A new one: hexadecimal digits.
std::string make_group_secret();

// Whether what a follower shows is the group's secret; takes the same time wherever they differ.
bool is_group_secret(std::string_view shown, std::string_view secret) noexcept;

}  // namespace collectives
