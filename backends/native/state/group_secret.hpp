// The secret of a group, which every connection shows first: whoever does not know it is dropped unanswered.
//
// Between processes of a machine it is part of the address of the leader's socket (bootstrap.cpp); between
// machines ranks take it from the group's store (transport/connection_manager.cpp).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace collectives {

inline constexpr std::size_t kGroupSecretCharacters = 32;

// A new one: hexadecimal digits.
std::string make_group_secret();

// Takes the same time wherever they differ.
bool same_secret(std::string_view given, std::string_view secret) noexcept;

}  // namespace collectives
