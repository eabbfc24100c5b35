#include "security/handshake.hpp"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "common/error.hpp"
#include "security/sha256.hpp"

namespace collectives {
namespace {

constexpr std::string_view kDialler = "dial";
constexpr std::string_view kAcceptor = "accept";

// A few bytes, for which a new connection has room.
bool send_whole(int socket, std::string_view bytes) noexcept {
  return ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

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

Handshake Handshake::accept(std::string key, std::string begin, std::size_t hello_bytes) {
  Handshake made(Stage::await_hello, std::move(key), std::move(begin));
  made.expected_ = hello_bytes + kNonceBytes;
  return made;
}

Handshake Handshake::dial(std::string key, std::string hello) {
  Handshake made(Stage::say_hello, std::move(key), {});
  made.hello_ = std::move(hello) + make_nonce();
  return made;
}

std::string_view Handshake::hello() const noexcept {
  return std::string_view(hello_).substr(0, hello_.size() - std::min(kNonceBytes, hello_.size()));
}

std::string Handshake::proof(std::string_view role) const {
  return hmac_sha256(key_, std::string(role) + hello_ + nonce_);
}

bool Handshake::confirm(int socket) const { return send_whole(socket, proof(kAcceptor)); }

void Handshake::expect(Stage stage, std::size_t bytes) {
  stage_ = stage;
  expected_ = bytes;
  input_.clear();
}

Handshake::Status Handshake::advance(int socket) {
  switch (stage_) {
    case Stage::say_hello:
      expect(Stage::await_nonce, kNonceBytes);
      return send_whole(socket, hello_) ? Status::goes_on : Status::refused;
    case Stage::await_nonce:
      nonce_ = input_;
      expect(Stage::await_acceptance, kDigestBytes);
      return send_whole(socket, proof(kDialler)) ? Status::goes_on : Status::refused;
    case Stage::await_acceptance:
      return same_bytes(input_, proof(kAcceptor)) ? Status::proved : Status::refused;
    case Stage::await_hello:
      hello_ = input_;
      nonce_ = make_nonce();
      expect(Stage::await_proof, kDigestBytes);
      return send_whole(socket, nonce_) ? Status::goes_on : Status::refused;
    case Stage::await_proof:
      return same_bytes(input_, proof(kDialler)) ? Status::asks : Status::refused;
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
