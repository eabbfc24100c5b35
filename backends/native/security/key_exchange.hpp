// X25519 (RFC 7748), by libcrypto: what both ends of a connection alone know, whoever learns their job's
// secret later.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "security/libcrypto.hpp"

namespace collectives {

inline constexpr std::size_t kPublicKeyBytes = 32;

class KeyPair {
 public:
  // A fresh one. Throws ErrorKind::backend where there is no libcrypto, or it refuses. This and `shared_with`
  // throw ErrorKind::aborted at the process's exit.
  KeyPair();

  // kPublicKeyBytes long; nobody has drawn the same before.
  const std::string& public_key() const noexcept { return public_key_; }

  // The secret in common with the owner of another public key; empty where that is none.
  std::string shared_with(std::string_view other) const;

 private:
  std::unique_ptr<EvpKey, FreeOfLibcrypto> key_;
  std::string public_key_;
};

}  // namespace collectives
