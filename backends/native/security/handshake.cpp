#include "security/handshake.hpp"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "common/error.hpp"
#include "security/sha256.hpp"

namespace collectives {
namespace {

constexpr std::string_view kDialler = "dial";
constexpr std::string_view kAcceptor = "accept";
constexpr std::string_view kDiffers = "differ";
constexpr std::size_t kSuiteBytes = 1;
// What both ends derive.
constexpr std::string_view kOfDialler = "secret of the dialler";
constexpr std::string_view kOfAcceptor = "secret of the acceptor";

// A few bytes, for which a new connection has room. Where it has not, errno says why.
bool send_whole(int socket, std::string_view bytes) noexcept {
  const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(bytes.size())) return true;
  if (sent >= 0) errno = EAGAIN;
  return false;
}

}  // namespace

void check_encryption() {
  const KeyPair key;
  for (const CipherSuite suite : {CipherSuite::aes_256_gcm, CipherSuite::chacha20_poly1305}) {
    const RecordCipher cipher(RecordCipher::Role::seals, suite, std::string(kSecretBytes, '\0'));
  }
}

bool can_encrypt() noexcept {
  static const bool kCan = [] {
    try {
      check_encryption();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return kCan;
}

std::string make_nonce() {
  std::string bytes(kNonceBytes, '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::getrandom(bytes.data() + done, bytes.size() - done, 0);
    if (got < 0 && errno != EINTR) throw Error(ErrorKind::backend, with_errno("getrandom failed", errno));
    if (got > 0) done += static_cast<std::size_t>(got);
  }
  return bytes;
}

bool same_bytes(std::string_view one, std::string_view other) noexcept {
  if (one.size() != other.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    difference |= static_cast<unsigned char>(one[i]) ^ static_cast<unsigned char>(other[i]);
  }
  return difference == 0;
}

Handshake::Handshake(Stage stage, std::string key, std::string begin)
    : stage_(stage), key_(std::move(key)), begin_(std::move(begin)) {}

Handshake Handshake::accept(std::string key, std::string begin, std::size_t hello_bytes, Takes takes) {
  Handshake made(Stage::await_hello, std::move(key), std::move(begin));
  made.takes_ = takes;
  made.expected_ = hello_bytes + kSuiteBytes + kNonceBytes;
  return made;
}

Handshake Handshake::dial(std::string key, std::string hello, CipherSuite suite) {
  Handshake made(Stage::say_hello, std::move(key), {});
  made.dials_ = true;
  made.hello_ = std::move(hello) + static_cast<char>(suite);
  made.hello_ += made.fresh_bytes(suite != CipherSuite::none);
  return made;
}

std::string_view Handshake::hello() const noexcept {
  constexpr std::size_t kRest = kSuiteBytes + kNonceBytes;
  return std::string_view(hello_).substr(0, hello_.size() - std::min(kRest, hello_.size()));
}

CipherSuite Handshake::suite() const noexcept {
  return static_cast<CipherSuite>(hello_[hello_.size() - kNonceBytes - kSuiteBytes]);
}

std::string Handshake::fresh_bytes(bool public_key) {
  if (!public_key) return make_nonce();
  key_pair_.emplace();
  return key_pair_->public_key();
}

std::string Handshake::proof(std::string_view role) const {
  return hmac_sha256(key_, std::string(role) + hello_ + nonce_);
}

Channel Handshake::channel(int socket, std::size_t batch) const {
  if (suite() == CipherSuite::none) return Channel(socket);
  if (!key_pair_) throw Error(ErrorKind::network, "the handshake has not come to the public keys");
  const std::string theirs = dials_ ? nonce_ : hello_.substr(hello_.size() - kNonceBytes);
  const std::string shared = key_pair_->shared_with(theirs);
  if (shared.empty()) throw Error(ErrorKind::network, "the other end has sent no public key of X25519");
  const std::string extracted = hmac_sha256(key_, shared);
  const auto expanded = [&](std::string_view purpose) {
    return hmac_sha256(extracted, std::string(purpose) + hello_ + nonce_ + '\x01');
  };
  SessionSecrets secrets{
      .suite = suite(), .outgoing = expanded(kOfDialler), .incoming = expanded(kOfAcceptor)};
  if (!dials_) std::swap(secrets.outgoing, secrets.incoming);
  return {socket, std::move(secrets), batch};
}

bool Handshake::confirm(int socket) const { return send_whole(socket, proof(kAcceptor)); }

void Handshake::expect(Stage stage, std::size_t bytes) {
  stage_ = stage;
  expected_ = bytes;
  input_.clear();
}

Handshake::Status Handshake::said(int socket, std::string_view bytes) {
  if (send_whole(socket, bytes)) return Status::goes_on;
  ended_ = true;
  error_ = errno;
  return Status::refused;
}

Handshake::Status Handshake::advance(int socket) {
  switch (stage_) {
    case Stage::say_hello:
      expect(Stage::await_nonce, kNonceBytes);
      return said(socket, hello_);
    case Stage::await_nonce:
      nonce_ = input_;
      expect(Stage::await_acceptance, kDigestBytes);
      return said(socket, proof(kDialler));
    case Stage::await_acceptance:
      if (same_bytes(input_, proof(kDiffers))) return Status::differs;
      return same_bytes(input_, proof(kAcceptor)) ? Status::proved : Status::refused;
    case Stage::await_hello:
      hello_ = input_;
      if (suite() > CipherSuite::chacha20_poly1305) return Status::refused;
      // Where it does not encrypt, random bytes do: it will not take the connection.
      try {
        nonce_ = fresh_bytes(takes_.encrypted && suite() != CipherSuite::none);
      } catch (const Error& error) {  // whoever is there, even a stranger, is to be told nothing of it
        trouble_ = error.message();
        return Status::refused;
      }
      expect(Stage::await_proof, kDigestBytes);
      return said(socket, nonce_);
    case Stage::await_proof:
      if (!same_bytes(input_, proof(kDialler))) return Status::refused;
      if (suite() == CipherSuite::none ? takes_.clear : takes_.encrypted) return Status::asks;
      static_cast<void>(send_whole(socket, proof(kDiffers)));
      return Status::differs;
  }
  return Status::refused;
}

Handshake::Status Handshake::step(int socket) {
  if (stage_ == Stage::say_hello) return advance(socket);
  for (;;) {
    if (input_.size() < expected_) {
      std::array<char, 256> bytes{};
      const std::size_t wanted = std::min(bytes.size(), expected_ - input_.size());
      const ssize_t got = ::recv(socket, bytes.data(), wanted, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Status::goes_on;
      if (got <= 0) {
        ended_ = true;
        error_ = got < 0 ? errno : 0;
        return Status::refused;
      }
      input_.append(bytes.data(), static_cast<std::size_t>(got));
      if (stage_ == Stage::await_hello) {
        const std::size_t known = std::min(input_.size(), begin_.size());
        greeted_ = std::string_view(input_).substr(0, known) == std::string_view(begin_).substr(0, known);
        if (!greeted_) return Status::refused;
      }
      if (input_.size() < expected_) continue;
    }
    const Status status = advance(socket);
    if (status != Status::goes_on) return status;
  }
}

}  // namespace collectives
