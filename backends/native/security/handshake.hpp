// How both ends of a connection prove to each other that they know a key, before anything else is sent.
//
//   dialler -> acceptor   hello: what the connection is for, then 32 random bytes
//   acceptor -> dialler   32 random bytes
//   dialler -> acceptor   HMAC-SHA-256(key, "dial" hello nonce)
//   acceptor -> dialler   HMAC-SHA-256(key, "accept" hello nonce)
//
// The key itself never travels, and what was overheard proves nothing later. An acceptor keeps no more than
// a hello of a stranger, and answers nothing that depends on the key. What follows on the connection is not
// protected: whoever can change packets on their way can still do so.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace collectives {

inline constexpr std::size_t kNonceBytes = 32;

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
    refused,  // the connection is to be closed
  };

  // Of whoever takes a connection.
  //   key: what both ends know.
  //   begin: the first bytes of every hello.
  //   hello_bytes: length of a hello without its nonce.
  static Handshake accept(std::string key, std::string begin, std::size_t hello_bytes);

  // Of whoever makes a connection; `hello` without a nonce.
  static Handshake dial(std::string key, std::string hello);

  // Sends and reads what can be at once, and never reads beyond the handshake. The first one of a dialler
  // sends the hello and reads nothing. The socket is non-blocking.
  Status step(int socket);

  // The acceptor's last word, which takes the connection. Returns whether it could be sent.
  bool confirm(int socket) const;

  // Whether what has come could be a hello, or was one.
  bool greeted() const noexcept { return greeted_; }

  // The hello that has come, without its nonce; believed once the status is `asks`.
  std::string_view hello() const noexcept;

  // Whether the connection has ended under a handshake that was refused, and of what error; 0 where the other
  // end closed it.
  bool ended() const noexcept { return ended_; }
  int error() const noexcept { return error_; }

 private:
  enum class Stage { say_hello, await_nonce, await_acceptance, await_hello, await_proof };

  Handshake(Stage stage, std::string key, std::string begin);
  void expect(Stage stage, std::size_t bytes);
  Status advance(int socket);
  std::string proof(std::string_view role) const;

  Stage stage_;
  std::string key_;
  std::string begin_;  // of a hello that is awaited
  std::string hello_;  // with its nonce
  std::string nonce_;  // the acceptor's
  std::string input_;
  std::size_t expected_ = 0;
  bool greeted_ = true;
  bool ended_ = false;
  int error_ = 0;
};

}  // namespace collectives
