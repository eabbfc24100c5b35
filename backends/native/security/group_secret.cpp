#include "security/group_secret.hpp"

#include "security/handshake.hpp"

namespace collectives {

std::string make_group_secret() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name;
  for (const char byte : make_nonce().substr(0, kGroupSecretCharacters / 2)) {
    name.push_back(kDigits[static_cast<unsigned char>(byte) >> 4]);
    name.push_back(kDigits[static_cast<unsigned char>(byte) & 15]);
  }
  return name;
}

bool is_group_secret(std::string_view shown, std::string_view secret) noexcept {
  return same_bytes(shown, secret);
}

}  // namespace collectives
