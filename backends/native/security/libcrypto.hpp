// The functions of OpenSSL's libcrypto that this core uses, found at run time: in the library that Python has
// loaded for `hashlib`, in the process itself where Python holds OpenSSL inside, or in the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace collectives {

// OpenSSL's types, of which only pointers are seen here.
struct EvpCipher;
struct EvpCipherContext;
struct EvpKey;
struct EvpKeyContext;
struct EvpEngine;

struct Libcrypto {
  const EvpCipher* (*EVP_aes_256_gcm)();
  const EvpCipher* (*EVP_chacha20_poly1305)();
  const EvpCipher* (*EVP_aes_256_ecb)();
  EvpCipherContext* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(EvpCipherContext*);
  int (*EVP_CIPHER_CTX_ctrl)(EvpCipherContext*, int type, int number, void* pointer);
  int (*EVP_CIPHER_CTX_set_padding)(EvpCipherContext*, int on);
  int (*EVP_CipherInit_ex)(EvpCipherContext*, const EvpCipher*, EvpEngine*, const unsigned char* key,
                           const unsigned char* iv, int encrypts);
  int (*EVP_CipherUpdate)(EvpCipherContext*, unsigned char* out, int* out_bytes, const unsigned char* in,
                          int in_bytes);
  int (*EVP_CipherFinal_ex)(EvpCipherContext*, unsigned char* out, int* out_bytes);
  EvpKeyContext* (*EVP_PKEY_CTX_new_id)(int id, EvpEngine*);
  EvpKeyContext* (*EVP_PKEY_CTX_new)(EvpKey*, EvpEngine*);
  void (*EVP_PKEY_CTX_free)(EvpKeyContext*);
  int (*EVP_PKEY_keygen_init)(EvpKeyContext*);
  int (*EVP_PKEY_keygen)(EvpKeyContext*, EvpKey**);
  void (*EVP_PKEY_free)(EvpKey*);
  int (*EVP_PKEY_get_raw_public_key)(const EvpKey*, unsigned char* out, std::size_t* bytes);
  EvpKey* (*EVP_PKEY_new_raw_public_key)(int id, EvpEngine*, const unsigned char* key, std::size_t bytes);
  int (*EVP_PKEY_derive_init)(EvpKeyContext*);
  int (*EVP_PKEY_derive_set_peer)(EvpKeyContext*, EvpKey*);
  int (*EVP_PKEY_derive)(EvpKeyContext*, unsigned char* out, std::size_t* bytes);
  void (*ERR_clear_error)();
  int (*OPENSSL_init_crypto)(std::uint64_t options, const void* settings);
};

// Sonames, the best first, of versions that have all of it (1.1.1 and later).
std::span<const char* const> libcrypto_names() noexcept;

// The first of the named libraries that is loaded, else any that is loaded as libcrypto, else what the
// process holds itself, else the first that the system has. Throws ErrorKind::backend, with the way out,
// where none of them has all functions.
Libcrypto load_libcrypto(std::span<const char* const> names);

// That, looked for once: where there is none, each call throws the same.
const Libcrypto& libcrypto();

// While it lives, `libcrypto` returns the functions that it is given: for tests of what a library may refuse.
class LibcryptoInstead {
 public:
  explicit LibcryptoInstead(const Libcrypto& functions) noexcept;
  ~LibcryptoInstead();
  LibcryptoInstead(const LibcryptoInstead&) = delete;
  LibcryptoInstead& operator=(const LibcryptoInstead&) = delete;
};

// Around each use of its ciphers: at the process's exit, OpenSSL frees what threads may still use. From then
// on nothing is to be begun, and the exit waits for what was. So nothing that blocks belongs within one.
class LibcryptoUse {
 public:
  LibcryptoUse() noexcept;
  ~LibcryptoUse();
  LibcryptoUse(const LibcryptoUse&) = delete;
  LibcryptoUse& operator=(const LibcryptoUse&) = delete;

  // Whether the process is not at its exit.
  explicit operator bool() const noexcept { return allowed_; }
  // Throws ErrorKind::aborted where it is.
  void check() const;

 private:
  bool allowed_;
};

// Frees OpenSSL's objects, except at the process's exit, with which they go.
struct FreeOfLibcrypto {
  void operator()(EvpCipherContext* context) const noexcept;
  void operator()(EvpKey* key) const noexcept;
  void operator()(EvpKeyContext* context) const noexcept;
};

}  // namespace collectives
