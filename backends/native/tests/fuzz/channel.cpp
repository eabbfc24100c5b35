// Fuzz target for what an encrypted connection makes of the bytes that come on it.
//
// The input is a list of turns (turns.hpp), whose number chooses what somebody between the ends does:
//   even   puts the bytes in
//   odd    lets the next record pass that carries them; above 127 without its tag
// The victim reads into as much room as the number says. What it gets is what was sent, in order, from the
// beginning; after the first byte that was put in, or left out, nothing of what follows.
#include "security/channel.hpp"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "memory/descriptor.hpp"
#include "tests/fuzz/turns.hpp"
#include "tests/testing.hpp"

namespace collectives {
namespace {

class Connection {
 public:
  Connection() : seals_(RecordCipher::Role::seals, CipherSuite::aes_256_gcm, secret('i')) {
    std::array<int, 2> sockets{};
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets.data()) == 0);
    near_ = Descriptor(sockets[0]);
    far_ = Descriptor(sockets[1]);
    victim_ = Channel(
        far_.get(), {.suite = CipherSuite::aes_256_gcm, .outgoing = secret('o'), .incoming = secret('i')}, 2);
  }

  void turn(unsigned char number, std::string_view bytes) {
    if (!bytes.empty()) number % 2 == 0 ? put_in(bytes) : pass(bytes, number);
    read(1 + 40 * std::size_t{number});
  }

 private:
  static std::string secret(char letter) { return std::string(kSecretBytes, letter); }

  void put_in(std::string_view bytes) {
    send(bytes);
    tampered_ = true;
  }

  void pass(std::string_view bytes, unsigned char number) {
    std::string record(record_bytes(bytes.size()), '\0');
    const iovec part{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
    seals_.seal(&part, bytes.size(), reinterpret_cast<std::byte*>(record.data()));
    const bool whole = number <= 127;
    send(std::string_view(record).substr(0, record.size() - (whole ? 0 : kRecordTagBytes)));
    if (!tampered_ && whole) sent_ += bytes;
    tampered_ = tampered_ || !whole;
  }

  void send(std::string_view bytes) {
    // What the socket does not take is left out.
    const ssize_t size = ::send(near_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (size != static_cast<ssize_t>(bytes.size())) tampered_ = true;
  }

  void read(std::size_t room) {
    std::string got(room, '\0');
    const ssize_t size = victim_.receive(got.data(), got.size());
    if (size < 0) {
      const bool forged = errno == kForged;
      CHECK(errno == EAGAIN || (forged && tampered_));
      CHECK(victim_.holds() == forged);
      return;
    }
    const auto taken = static_cast<std::size_t>(size);
    CHECK(taken <= room && taken <= sent_.size() - taken_);
    CHECK(got.compare(0, taken, sent_, taken_, taken) == 0);
    CHECK(taken == room || !victim_.holds() || tampered_);
    taken_ += taken;
  }

  Descriptor near_;
  Descriptor far_;
  Channel victim_;
  RecordCipher seals_;
  std::string sent_;
  std::size_t taken_ = 0;
  bool tampered_ = false;
};

}  // namespace
}  // namespace collectives

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  collectives::Connection connection;
  collectives::for_each_turn(
      data, size, [&](unsigned char number, std::string_view bytes) { connection.turn(number, bytes); });
  return 0;
}
