// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), for proofs of a few hundred bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace collectives {

inline constexpr std::size_t kDigestBytes = 32;

// The digest of a text, kDigestBytes long.
std::string sha256(std::string text);

std::string hmac_sha256(std::string_view key, std::string_view text);

}  // namespace collectives
