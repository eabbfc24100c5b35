// How both ends of a connection prove to each other that they know a key, before anything else is sent, and
// agree on how what follows is encrypted.
//
//   dialler -> acceptor   hello: what the connection is for, a cipher suite (1 byte), then 32 fresh bytes
//   acceptor -> dialler   32 fresh bytes
//   dialler -> acceptor   HMAC-SHA-256(key, "dial" hello fresh)
//   acceptor -> dialler   HMAC-SHA-256(key, "accept" hello fresh), or with "differ" where it wants what
//                         follows in clear and the dialler does not, or the other way round
//
// The key itself never travels, and what was overheard proves nothing later. An acceptor keeps no more than
// a hello of a stranger, and answers nothing that depends on the key. The proofs cover the suite: whoever
// changes it on its way breaks the handshake.
//
// Where the suite is none, the fresh bytes are random, and what follows is in clear: whoever can read or
// change packets on their way can still do so. Else they are public keys of X25519, drawn for this
// connection, and HKDF (RFC 5869) of what the two have in common and of the key, over hello and fresh bytes,
// gives a secret for each direction (records.hpp). So who learns the key later reads nothing that was sent
// before.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "security/channel.hpp"
#include "security/key_exchange.hpp"
#include "security/records.hpp"

namespace collectives {

inline constexpr std::size_t kNonceBytes = 32;

// Throws ErrorKind::backend, with the way out, where this process cannot encrypt: there is no libcrypto, or
// it refuses keys or ciphers.
void check_encryption();
// Whether it can; found out once.
bool can_encrypt() noexcept;

// Random bytes of the kernel.
std::string make_nonce();

// Takes the same time wherever they differ.
bool same_bytes(std::string_view one, std::string_view other) noexcept;

class Handshake {
 public:
  enum class Status {
    goes_on,  // waits for bytes of the other end
    asks,     // the dialler has proved itself; `confirm` takes it
    proved,   // the acceptor has taken this end, and proved itself
    differs,  // one end encrypts, the other does not; both have proved themselves
    refused,  // the connection is to be closed
  };

  // What an acceptor takes.
  struct Takes {
    bool clear = true;
    bool encrypted = false;
  };

  // Of whoever takes a connection.
  //   key: what both ends know.
  //   begin: the first bytes of every hello.
  //   hello_bytes: length of a hello without its nonce.
  static Handshake accept(std::string key, std::string begin, std::size_t hello_bytes, Takes takes);

  // Of whoever makes a connection; `hello` without suite and nonce. Throws ErrorKind::backend where it is to
  // be encrypted and there is no libcrypto.
  static Handshake dial(std::string key, std::string hello, CipherSuite suite);

  // Sends and reads what can be at once, and never reads beyond the handshake. The first one of a dialler
  // sends the hello and reads nothing. The socket is non-blocking.
  Status step(int socket);

  // The acceptor's last word, which takes the connection. Returns whether it could be sent.
  bool confirm(int socket) const;

  // The connection from then on, and from `proved` on. `batch`: as of Channel.
  Channel channel(int socket, std::size_t batch) const;

  // Whether what has come could be a hello, or was one.
  bool greeted() const noexcept { return greeted_; }

  // The hello that has come, without suite and nonce; believed once the status is `asks`.
  std::string_view hello() const noexcept;

  // What the acceptor has sent as its fresh bytes, or instead of them.
  const std::string& nonce() const noexcept { return nonce_; }

  // Whether the connection has ended under a handshake that was refused, and of what error; 0 where the other
  // end closed it.
  bool ended() const noexcept { return ended_; }
  int error() const noexcept { return error_; }

  // Why this end itself has refused to go on as it should, as where libcrypto makes no key; else empty.
  const std::string& trouble() const noexcept { return trouble_; }

 private:
  enum class Stage { say_hello, await_nonce, await_acceptance, await_hello, await_proof };

  Handshake(Stage stage, std::string key, std::string begin);
  void expect(Stage stage, std::size_t bytes);
  Status advance(int socket);
  Status said(int socket, std::string_view bytes);
  CipherSuite suite() const noexcept;
  std::string fresh_bytes(bool public_key);
  std::string proof(std::string_view role) const;

  Stage stage_;
  std::string key_;
  std::string begin_;  // of a hello that is awaited
  std::string hello_;  // with suite and nonce
  std::string nonce_;  // the acceptor's
  Takes takes_;
  std::optional<KeyPair> key_pair_;  // whose public half is this end's nonce
  bool dials_ = false;
  std::string input_;
  std::size_t expected_ = 0;
  bool greeted_ = true;
  bool ended_ = false;
  int error_ = 0;
  std::string trouble_;
};

}  // namespace collectives
