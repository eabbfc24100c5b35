#include "security/libcrypto.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "common/clock.hpp"
#include "common/error.hpp"

namespace collectives {
namespace {

constexpr std::array<const char*, 3> kNames = {"libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1"};

constexpr std::uint64_t kLoadStrings = 2;  // OPENSSL_INIT_LOAD_CRYPTO_STRINGS

std::atomic<int> uses{0};
std::atomic<bool> exiting{false};
std::atomic<const Libcrypto*> instead{nullptr};

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

// The functions of one library; nothing where it lacks one.
std::optional<Libcrypto> functions_of(void* library) {
  Libcrypto found{};
  bool all = true;
#define COLLECTIVES_FIND(name) all = all && find(library, #name, found.name)
  COLLECTIVES_FIND(EVP_aes_256_gcm);
  COLLECTIVES_FIND(EVP_chacha20_poly1305);
  COLLECTIVES_FIND(EVP_aes_256_ecb);
  COLLECTIVES_FIND(EVP_CIPHER_CTX_new);
  COLLECTIVES_FIND(EVP_CIPHER_CTX_free);
  COLLECTIVES_FIND(EVP_CIPHER_CTX_ctrl);
  COLLECTIVES_FIND(EVP_CIPHER_CTX_set_padding);
  COLLECTIVES_FIND(EVP_CipherInit_ex);
  COLLECTIVES_FIND(EVP_CipherUpdate);
  COLLECTIVES_FIND(EVP_CipherFinal_ex);
  COLLECTIVES_FIND(EVP_PKEY_CTX_new_id);
  COLLECTIVES_FIND(EVP_PKEY_CTX_new);
  COLLECTIVES_FIND(EVP_PKEY_CTX_free);
  COLLECTIVES_FIND(EVP_PKEY_keygen_init);
  COLLECTIVES_FIND(EVP_PKEY_keygen);
  COLLECTIVES_FIND(EVP_PKEY_free);
  COLLECTIVES_FIND(EVP_PKEY_get_raw_public_key);
  COLLECTIVES_FIND(EVP_PKEY_new_raw_public_key);
  COLLECTIVES_FIND(EVP_PKEY_derive_init);
  COLLECTIVES_FIND(EVP_PKEY_derive_set_peer);
  COLLECTIVES_FIND(EVP_PKEY_derive);
  COLLECTIVES_FIND(ERR_clear_error);
  COLLECTIVES_FIND(OPENSSL_init_crypto);
#undef COLLECTIVES_FIND
  return all ? std::optional(found) : std::nullopt;
}

std::optional<Libcrypto> opened(const char* name, int flags) {
  void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);
  return library == nullptr ? std::nullopt : functions_of(library);
}

// The file of a library that is loaded under a name of its own, as wheels have them: libcrypto-1a2b3c4d.so.3.
std::string loaded_file() {
  std::string file;
  ::dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* result) {
        const std::string_view path = object->dlpi_name == nullptr ? "" : object->dlpi_name;
        if (!path.substr(path.rfind('/') + 1).starts_with("libcrypto")) return 0;
        *static_cast<std::string*>(result) = path;
        return 1;
      },
      &file);
  return file;
}

// A use lasts for a batch of records. The limit is for what nobody has thought of: no exit hangs for it.
void await_uses() noexcept {
  constexpr Nanoseconds kMost = 5 * kSecond;
  exiting.store(true);
  for (const Nanoseconds end = now_ns() + kMost; uses.load() != 0 && now_ns() < end;) ::sched_yield();
}

// Those of the parent's other threads, which are not here.
void forget_uses() noexcept { uses.store(0); }

template <class Object>
void free_with(void (*Libcrypto::*function)(Object*), Object* object) noexcept {
  const LibcryptoUse use;
  if (!use) return;
  try {
    (libcrypto().*function)(object);
  } catch (const std::exception&) {
    // Where there is no libcrypto, there are no objects of it.
  }
}

std::variant<Libcrypto, Error> found_libcrypto() {
  try {
    const Libcrypto found = load_libcrypto(libcrypto_names());
    // Here OpenSSL registers its own handler, which must come before: the last is called first. Asked for
    // nothing, it does nothing.
    found.OPENSSL_init_crypto(kLoadStrings, nullptr);
    std::atexit(await_uses);
    ::pthread_atfork(nullptr, nullptr, forget_uses);
    return found;
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace

std::span<const char* const> libcrypto_names() noexcept { return kNames; }

Libcrypto load_libcrypto(std::span<const char* const> names) {
  for (const char* name : names) {
    if (const auto found = opened(name, RTLD_NOLOAD)) return *found;
  }
  if (!names.empty()) {
    if (const std::string file = loaded_file(); !file.empty()) {
      if (const auto found = opened(file.c_str(), RTLD_NOLOAD)) return *found;
    }
    if (const auto found = functions_of(RTLD_DEFAULT)) return *found;
  }
  for (const char* name : names) {
    if (const auto found = opened(name, 0)) return *found;
  }
  throw Error(
      ErrorKind::backend,
      "connections between machines are encrypted by OpenSSL's libcrypto (1.1.1 or later), and neither "
      "this Python nor the system has one: install the package with libcrypto.so.3 (libssl3, "
      "openssl-libs, or openssl), or send in clear with COLLECTIVES_ENCRYPTION=off on all ranks");
}

const Libcrypto& libcrypto() {
  // Acquire: the functions that a test has put together.
  if (const Libcrypto* const other = instead.load(std::memory_order_acquire)) return *other;
  // It stays at the process's exit, as threads do.
  static const auto* const kFound = new std::variant<Libcrypto, Error>(found_libcrypto());
  if (const Error* const error = std::get_if<Error>(kFound)) throw Error(*error);
  return std::get<Libcrypto>(*kFound);
}

LibcryptoInstead::LibcryptoInstead(const Libcrypto& functions) noexcept {
  instead.store(&functions, std::memory_order_release);
}

LibcryptoInstead::~LibcryptoInstead() { instead.store(nullptr, std::memory_order_release); }

LibcryptoUse::LibcryptoUse() noexcept {
  uses.fetch_add(1);
  allowed_ = !exiting.load();
}

LibcryptoUse::~LibcryptoUse() { uses.fetch_sub(1); }

void LibcryptoUse::check() const {
  if (!allowed_)
    throw Error(ErrorKind::aborted, "this process is at its exit, and encrypts nothing any more");
}

void FreeOfLibcrypto::operator()(EvpCipherContext* context) const noexcept {
  free_with(&Libcrypto::EVP_CIPHER_CTX_free, context);
}

void FreeOfLibcrypto::operator()(EvpKey* key) const noexcept { free_with(&Libcrypto::EVP_PKEY_free, key); }

void FreeOfLibcrypto::operator()(EvpKeyContext* context) const noexcept {
  free_with(&Libcrypto::EVP_PKEY_CTX_free, context);
}

}  // namespace collectives
