#include "security/records.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "common/error.hpp"
#include "security/handshake.hpp"
#include "security/sha256.hpp"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace collectives {
namespace {

constexpr int kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG, and EVP_CTRL_AEAD_GET_TAG
constexpr int kGetTag = 0x10;
constexpr std::size_t kNonceOfCipher = 12;
constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kCheckBytes = kRecordHeaderBytes - kLengthBytes;
constexpr std::size_t kBlock = 16;

// HKDF-Expand with one block of output.
std::string expand(const std::string& secret, std::string_view purpose) {
  return hmac_sha256(secret, std::string(purpose) + '\x01');
}

const unsigned char* octets(const void* bytes) noexcept { return static_cast<const unsigned char*>(bytes); }
unsigned char* octets(void* bytes) noexcept { return static_cast<unsigned char*>(bytes); }

bool has_aes() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  return __builtin_cpu_supports("aes") != 0 && __builtin_cpu_supports("pclmul") != 0;
#elif defined(__aarch64__)
  constexpr unsigned long kAes = 1UL << 3;  // HWCAP_AES
  return (::getauxval(AT_HWCAP) & kAes) != 0;
#else
  return false;
#endif
}

[[noreturn]] void throw_unusable() {
  libcrypto().ERR_clear_error();
  throw Error(ErrorKind::backend,
              "OpenSSL's libcrypto of this process does not encrypt by AES-256-GCM and ChaCha20-Poly1305, as "
              "where it is restricted; to send in clear between machines, set COLLECTIVES_ENCRYPTION=off on "
              "all ranks");
}

}  // namespace

CipherSuite preferred_suite() noexcept {
  static const CipherSuite kPreferred = has_aes() ? CipherSuite::aes_256_gcm : CipherSuite::chacha20_poly1305;
  return kPreferred;
}

RecordCipher::RecordCipher(Role role, CipherSuite suite, std::string secret,
                           std::uint64_t records_of_a_secret)
    : role_(role), suite_(suite), records_of_a_secret_(records_of_a_secret), secret_(std::move(secret)) {
  const LibcryptoUse use;
  use.check();
  cipher_.reset(libcrypto().EVP_CIPHER_CTX_new());
  checks_.reset(libcrypto().EVP_CIPHER_CTX_new());
  take_secret();
}

void RecordCipher::take_secret() {
  const Libcrypto& crypto = libcrypto();
  const std::string key = expand(secret_, "key");
  const std::string key_of_checks = expand(secret_, "checks");
  nonce_ = expand(secret_, "nonce").substr(0, kNonceOfCipher);
  number_ = 0;
  const EvpCipher* const cipher =
      suite_ == CipherSuite::aes_256_gcm ? crypto.EVP_aes_256_gcm() : crypto.EVP_chacha20_poly1305();
  if (!cipher_ || !checks_ ||
      crypto.EVP_CipherInit_ex(cipher_.get(), cipher, nullptr, octets(key.data()), nullptr,
                               role_ == Role::seals ? 1 : 0) != 1 ||
      crypto.EVP_CipherInit_ex(checks_.get(), crypto.EVP_aes_256_ecb(), nullptr, octets(key_of_checks.data()),
                               nullptr, 1) != 1 ||
      crypto.EVP_CIPHER_CTX_set_padding(checks_.get(), 0) != 1) {
    throw_unusable();
  }
}

void RecordCipher::advance() {
  if (++number_ < records_of_a_secret_) return;
  secret_ = expand(secret_, "next");
  take_secret();
}

void RecordCipher::check_of(const std::byte* length, std::byte* check) {
  std::array<std::byte, kBlock> block{};
  std::memcpy(block.data(), &number_, sizeof(number_));
  std::memcpy(block.data() + sizeof(number_), length, kLengthBytes);
  std::array<std::byte, 2 * kBlock> encrypted{};
  int size = 0;
  if (libcrypto().EVP_CipherUpdate(checks_.get(), octets(encrypted.data()), &size, octets(block.data()),
                                   kBlock) != 1 ||
      size != static_cast<int>(kBlock)) {
    throw_unusable();
  }
  std::memcpy(check, encrypted.data(), kCheckBytes);
}

// Sets the nonce, and takes the header as what is authenticated beside the bytes.
bool RecordCipher::begin(const std::byte* header) {
  std::array<unsigned char, kNonceOfCipher> nonce{};
  std::memcpy(nonce.data(), nonce_.data(), nonce.size());
  std::array<unsigned char, sizeof(number_)> number{};
  std::memcpy(number.data(), &number_, sizeof(number_));
  for (std::size_t i = 0; i < number.size(); ++i) nonce[nonce.size() - number.size() + i] ^= number[i];
  int size = 0;
  return libcrypto().EVP_CipherInit_ex(cipher_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1 &&
         libcrypto().EVP_CipherUpdate(cipher_.get(), nullptr, &size, octets(header), kRecordHeaderBytes) == 1;
}

void RecordCipher::seal(const iovec* parts, std::size_t bytes, std::byte* record) {
  const auto length = static_cast<std::uint32_t>(bytes);
  std::memcpy(record, &length, kLengthBytes);
  check_of(record, record + kLengthBytes);
  bool done = begin(record);
  std::byte* out = record + kRecordHeaderBytes;
  int size = 0;
  for (std::size_t left = bytes; done && left > 0; ++parts) {
    const std::size_t here = std::min(left, parts->iov_len);
    if (here == 0) continue;
    done = libcrypto().EVP_CipherUpdate(cipher_.get(), octets(out), &size, octets(parts->iov_base),
                                        static_cast<int>(here)) == 1;
    out += here;
    left -= here;
  }
  done = done && libcrypto().EVP_CipherFinal_ex(cipher_.get(), octets(out), &size) == 1 &&
         libcrypto().EVP_CIPHER_CTX_ctrl(cipher_.get(), kGetTag, kRecordTagBytes, out) == 1;
  if (!done) throw_unusable();
  advance();
}

std::size_t RecordCipher::length(const std::byte* header) {
  std::uint32_t length = 0;
  std::memcpy(&length, header, kLengthBytes);
  if (length == 0 || length > kMostRecordBytes) return 0;
  std::string check(kCheckBytes, '\0');
  check_of(header, reinterpret_cast<std::byte*>(check.data()));
  const std::string_view come(reinterpret_cast<const char*>(header) + kLengthBytes, kCheckBytes);
  return same_bytes(check, come) ? length : 0;
}

bool RecordCipher::open(const std::byte* record, std::size_t bytes, const iovec* parts) {
  const std::byte* in = record + kRecordHeaderBytes;
  bool done = begin(record);
  int size = 0;
  for (std::size_t left = bytes; done && left > 0; ++parts) {
    const std::size_t here = std::min(left, parts->iov_len);
    if (here == 0) continue;
    done = libcrypto().EVP_CipherUpdate(cipher_.get(), octets(parts->iov_base), &size, octets(in),
                                        static_cast<int>(here)) == 1;
    in += here;
    left -= here;
  }
  std::array<unsigned char, kRecordTagBytes> tag{};
  std::memcpy(tag.data(), in, tag.size());
  std::array<unsigned char, kBlock> nothing{};
  done = done && libcrypto().EVP_CIPHER_CTX_ctrl(cipher_.get(), kSetTag, kRecordTagBytes, tag.data()) == 1;
  if (!done) throw_unusable();
  if (libcrypto().EVP_CipherFinal_ex(cipher_.get(), nothing.data(), &size) != 1) {  // which compares the tag
    libcrypto().ERR_clear_error();
    return false;
  }
  advance();
  return true;
}

}  // namespace collectives
