// Digests, proofs, and whose process is at the other end of a connection.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "memory/descriptor.hpp"
#include "security/handshake.hpp"
#include "security/peer_process.hpp"
#include "security/sha256.hpp"
#include "sockets/tcp_socket.hpp"
#include "tests/testing.hpp"

namespace collectives {
namespace {

using Status = Handshake::Status;

std::string in_hexadecimal(const std::string& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

// FIPS 180-4's examples, and RFC 4231's.
void test_digests() {
  CHECK(in_hexadecimal(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(in_hexadecimal(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(in_hexadecimal(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(in_hexadecimal(sha256(std::string(1'000'000, 'a'))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  CHECK(in_hexadecimal(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(in_hexadecimal(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(in_hexadecimal(hmac_sha256(std::string(131, '\xaa'),
                                   "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

constexpr std::string_view kKey = "0123456789abcdef0123456789abcdef";
constexpr std::string_view kHello = "hello of rank 1";

struct Ends {
  Descriptor dialler;
  Descriptor acceptor;
};

Ends connected_pair() {
  std::array<int, 2> sockets{};
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets.data()) == 0);
  return {Descriptor(sockets[0]), Descriptor(sockets[1])};
}

Handshake acceptance(std::string_view key = kKey) {
  return Handshake::accept(std::string(key), "hello", kHello.size(), {});
}

Handshake dialling(std::string_view key = kKey) {
  return Handshake::dial(std::string(key), std::string(kHello), CipherSuite::none);
}

void send_bytes(const Descriptor& socket, const std::string& bytes) {
  CHECK(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

std::string receive_bytes(const Descriptor& socket) {
  std::array<char, 4096> bytes{};
  const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  return got <= 0 ? std::string() : std::string(bytes.data(), static_cast<std::size_t>(got));
}

void test_handshake() {
  const Ends ends = connected_pair();
  Handshake dialler = dialling();
  Handshake acceptor = acceptance();
  CHECK(acceptor.step(ends.acceptor.get()) == Status::goes_on);
  CHECK(dialler.step(ends.dialler.get()) == Status::goes_on);
  CHECK(acceptor.step(ends.acceptor.get()) == Status::goes_on);
  CHECK(dialler.step(ends.dialler.get()) == Status::goes_on);
  CHECK(acceptor.step(ends.acceptor.get()) == Status::asks);
  CHECK(acceptor.hello() == kHello);
  CHECK(dialler.step(ends.dialler.get()) == Status::goes_on);
  CHECK(acceptor.confirm(ends.acceptor.get()));
  send_bytes(ends.acceptor, "and what follows");
  CHECK(dialler.step(ends.dialler.get()) == Status::proved);
  CHECK(receive_bytes(ends.dialler) == "and what follows");
}

// With another key neither end takes the other, and the acceptor shows nothing that depends on its key.
void test_handshake_with_another_key() {
  const Ends ends = connected_pair();
  Handshake dialler = dialling("of another job, which is 32 long.");
  Handshake acceptor = acceptance();
  static_cast<void>(dialler.step(ends.dialler.get()));
  static_cast<void>(acceptor.step(ends.acceptor.get()));
  static_cast<void>(dialler.step(ends.dialler.get()));
  CHECK(acceptor.step(ends.acceptor.get()) == Status::refused);
  CHECK(receive_bytes(ends.dialler).empty());
  send_bytes(ends.acceptor, std::string(32, 'p'));  // an acceptor without the key
  CHECK(dialler.step(ends.dialler.get()) == Status::refused);
}

// What was overheard is worth nothing later, nor an acceptor's own words.
void test_replayed_handshakes() {
  Handshake dialler = dialling();
  const Ends overheard = connected_pair();
  static_cast<void>(dialler.step(overheard.dialler.get()));
  const std::string hello = receive_bytes(overheard.acceptor);
  send_bytes(overheard.acceptor, std::string(kNonceBytes, 'n'));
  static_cast<void>(dialler.step(overheard.dialler.get()));
  const std::string proof = receive_bytes(overheard.acceptor);
  CHECK(hello.size() == kHello.size() + 1 + kNonceBytes && proof.size() == kDigestBytes);

  const Ends again = connected_pair();
  Handshake acceptor = acceptance();
  send_bytes(again.dialler, hello + proof);
  CHECK(acceptor.step(again.acceptor.get()) == Status::refused);

  send_bytes(overheard.acceptor, proof);  // the dialler's own
  CHECK(dialler.step(overheard.dialler.get()) == Status::refused);
}

void test_bytes_that_are_no_handshake() {
  for (const std::string& bytes :
       {std::string(100'000, 'h'), std::string("GET / HTTP/1.1"), std::string(1, '\0')}) {
    const Ends ends = connected_pair();
    static_cast<void>(::send(ends.dialler.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
    Handshake acceptor = acceptance();
    CHECK(acceptor.step(ends.acceptor.get()) == Status::refused);
  }
  Ends ends = connected_pair();
  Handshake acceptor = acceptance();
  send_bytes(ends.dialler, std::string(kHello.substr(0, 3)));
  CHECK(acceptor.step(ends.acceptor.get()) == Status::goes_on);
  ends.dialler.reset();
  CHECK(acceptor.step(ends.acceptor.get()) == Status::refused && acceptor.error() == 0);
}

Descriptor accept_from(const Listener& listener) {
  pollfd waiting{.fd = listener.socket.get(), .events = POLLIN, .revents = 0};
  CHECK(::poll(&waiting, 1, 60'000) == 1);
  return accept_tcp(listener.socket);
}

void test_processes_of_peers() {
  const Listener listener = listen_tcp("127.0.0.1", 16);
  Descriptor dialled = begin_connect(listener.endpoint, "");
  const Descriptor taken = accept_from(listener);
  CHECK(peer_process(taken.get()) == PeerProcess::of_this_user);
  CHECK(peer_process(dialled.get()) == PeerProcess::of_this_user);
  // One that has ended belongs to nobody, whatever it has sent; the tables show it as root's.
  send_bytes(dialled, "last words");
  dialled.reset();
  CHECK(peer_process(taken.get()) == PeerProcess::elsewhere);
  const Ends ends = connected_pair();
  CHECK(peer_process(ends.acceptor.get()) == PeerProcess::elsewhere);
}

void test_process_of_another_user() {
  if (::geteuid() != 0) return;  // only root can be somebody else
  constexpr uid_t kNobody = 65534;
  const Listener listener = listen_tcp("127.0.0.1", 16);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(kNobody) != 0) ::_exit(1);
    const Descriptor dialled = begin_connect(listener.endpoint, "");
    pollfd waiting{.fd = dialled.get(), .events = POLLIN, .revents = 0};
    ::poll(&waiting, 1, 60'000);  // until the other end goes
    ::_exit(0);
  }
  Descriptor taken = accept_from(listener);
  CHECK(peer_process(taken.get()) == PeerProcess::of_another_user);
  taken.reset();
  CHECK(::waitpid(child, nullptr, 0) == child);
}

}  // namespace

Tests security_tests() {
  return {
      {"digests", test_digests},
      {"handshake", test_handshake},
      {"handshake with another key", test_handshake_with_another_key},
      {"replayed handshakes", test_replayed_handshakes},
      {"bytes that are no handshake", test_bytes_that_are_no_handshake},
      {"processes of peers", test_processes_of_peers},
      {"process of another user", test_process_of_another_user},
  };
}

}  // namespace collectives
