// Bytes of a connection in encrypted, authenticated records.
//
//   record   length of what it carries (4 bytes, little-endian, 1 to kMostRecordBytes); a check of that and
//            of the record's number (8 bytes); the bytes, encrypted; the tag of them and of all before (16)
//
// Each direction of a connection has a secret. Key, nonce and the key of the checks come from it by HKDF
// (RFC 5869), and the next secret, which takes over long before the numbers of records could come to an end.
// A record's nonce is the secret's nonce with the record's number, as in TLS 1.3 (RFC 8446, 5.3). So a record
// that was changed, repeated, left out, moved or made by others is found out: by its check as soon as its
// length is there, so that nobody waits for bytes that a changed length promises.
//
// The check is the first half of AES-256 of number and length, a pseudorandom function of them.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "security/libcrypto.hpp"

namespace collectives {

// As both ends of a connection say it in their handshake; none sends in clear.
enum class CipherSuite : std::uint8_t { none = 0, aes_256_gcm = 1, chacha20_poly1305 = 2 };

// The one that is fast on this machine.
CipherSuite preferred_suite() noexcept;

// A cipher of OpenSSL 3.1 or later needs that much at a time for its full speed.
inline constexpr std::size_t kMostRecordBytes = 64 << 10;
inline constexpr std::size_t kRecordHeaderBytes = 12;
inline constexpr std::size_t kRecordTagBytes = 16;
inline constexpr std::size_t kSecretBytes = 32;

// Of a record that carries so many bytes.
constexpr std::size_t record_bytes(std::size_t carried) noexcept {
  return kRecordHeaderBytes + carried + kRecordTagBytes;
}

// Records of one direction, at one of its ends. To be used, once made, within a LibcryptoUse that allows it.
class RecordCipher {
 public:
  enum class Role : std::uint8_t { seals, opens };
  // 64 GiB of the longest, below what one key of AES-GCM can protect (RFC 8446, 5.5).
  static constexpr std::uint64_t kRecordsOfASecret = 1 << 20;

  // Throws ErrorKind::backend where there is no libcrypto, or it lacks the suite, and ErrorKind::aborted at
  // the process's exit.
  RecordCipher(Role role, CipherSuite suite, std::string secret,
               std::uint64_t records_of_a_secret = kRecordsOfASecret);

  // Makes the next record of the `bytes` bytes that the parts begin with: at most kMostRecordBytes, not 0.
  void seal(const iovec* parts, std::size_t bytes, std::byte* record);

  // The number of bytes that the next record carries, from its header; 0 where that is not of the next
  // record.
  std::size_t length(const std::byte* header);

  // Opens the next record, whose length is known, into the parts, which have room. Returns whether it is what
  // the other end sealed; else what the parts hold is worth nothing, and nothing more can be opened.
  bool open(const std::byte* record, std::size_t bytes, const iovec* parts);

 private:
  using Context = std::unique_ptr<EvpCipherContext, FreeOfLibcrypto>;

  void take_secret();
  void advance();
  void check_of(const std::byte* length, std::byte* check);
  bool begin(const std::byte* header);

  const Role role_;
  const CipherSuite suite_;
  const std::uint64_t records_of_a_secret_;
  std::string secret_;
  std::string nonce_;
  std::uint64_t number_ = 0;  // of the next record since the secret was taken
  Context cipher_;
  Context checks_;
};

}  // namespace collectives
