#include "security/key_exchange.hpp"

#include "common/error.hpp"

namespace collectives {
namespace {

constexpr int kX25519 = 1034;  // NID_X25519, the same in all versions

using Context = std::unique_ptr<EvpKeyContext, FreeOfLibcrypto>;

unsigned char* bytes_of(std::string& text) noexcept { return reinterpret_cast<unsigned char*>(text.data()); }

}  // namespace

KeyPair::KeyPair() : public_key_(kPublicKeyBytes, '\0') {
  const Libcrypto& crypto = libcrypto();
  const LibcryptoUse use;
  use.check();
  EvpKey* key = nullptr;
  std::size_t size = public_key_.size();
  const Context context(crypto.EVP_PKEY_CTX_new_id(kX25519, nullptr));
  bool made = context && crypto.EVP_PKEY_keygen_init(context.get()) == 1 &&
              crypto.EVP_PKEY_keygen(context.get(), &key) == 1;
  key_.reset(key);
  made = made && crypto.EVP_PKEY_get_raw_public_key(key, bytes_of(public_key_), &size) == 1 &&
         size == kPublicKeyBytes;
  if (made) return;
  crypto.ERR_clear_error();
  throw Error(ErrorKind::backend,
              "OpenSSL's libcrypto makes no key of X25519, as where it is restricted to FIPS 140; to send in "
              "clear between machines, set COLLECTIVES_ENCRYPTION=off on all ranks");
}

std::string KeyPair::shared_with(std::string_view other) const {
  const Libcrypto& crypto = libcrypto();
  const LibcryptoUse use;
  use.check();
  if (other.size() != kPublicKeyBytes) return {};
  std::string secret(kPublicKeyBytes, '\0');
  std::size_t size = secret.size();
  const std::unique_ptr<EvpKey, FreeOfLibcrypto> peer(crypto.EVP_PKEY_new_raw_public_key(
      kX25519, nullptr, reinterpret_cast<const unsigned char*>(other.data()), other.size()));
  const Context context(crypto.EVP_PKEY_CTX_new(key_.get(), nullptr));
  // A point of small order makes it fail.
  const bool derived = peer && context && crypto.EVP_PKEY_derive_init(context.get()) == 1 &&
                       crypto.EVP_PKEY_derive_set_peer(context.get(), peer.get()) == 1 &&
                       crypto.EVP_PKEY_derive(context.get(), bytes_of(secret), &size) == 1 &&
                       size == secret.size();
  if (derived) return secret;
  crypto.ERR_clear_error();
  return {};
}

}  // namespace collectives
