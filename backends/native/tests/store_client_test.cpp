// The store's client: replies however they arrive, what a server must not say, time limits, and a server in
// the same process.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/clock.hpp"
#include "memory/descriptor.hpp"
#include "state/call.hpp"
#include "store/protocol.hpp"
#include "store/server.hpp"
#include "store_client/connection.hpp"
#include "store_client/local.hpp"
#include "tests/refusing_libcrypto.hpp"
#include "tests/testing.hpp"

namespace collectives {
namespace {

using store::Command;
using store_client::LocalConnection;
using store_client::Replies;
using store_client::SocketConnection;

// Gives up as often as it is told to.
class Program final : public Interrupt {
 public:
  explicit Program(bool gives_up = false) : gives_up_(gives_up) {}
  void blocks() override { ++blocked; }
  bool requested() override { return gives_up_; }
  std::string site() override { return ""; }

  int blocked = 0;

 private:
  bool gives_up_;
};

template <class T>
std::string number(T value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

std::string text(std::string_view content) {
  return number<std::uint64_t>(content.size()) + std::string(content);
}

std::string command(Command code) { return {static_cast<char>(code)}; }

struct ClientAndServer {
  ClientAndServer() {
    int sockets[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    client = Descriptor(sockets[0]);
    server = Descriptor(sockets[1]);
  }
  void say(std::string_view bytes) const {
    CHECK(::send(server.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
  }

  Descriptor client;
  Descriptor server;
};

Nanoseconds soon() { return now_ns() + 20 * kSecond; }

void replies_in_pieces() {
  const ClientAndServer ends;
  SocketConnection connection(ends.client.get());
  Program program;
  const std::string said = text("green") + number<std::int64_t>(2) + text("/a") + text("") + number<char>(1);
  std::thread server([&] {
    for (const char byte : said) ends.say({&byte, 1});
  });
  Replies& replies = connection.await("vlb", soon(), program);
  server.join();
  CHECK(replies.size() == 5);
  CHECK(replies.field(0).bytes == "green");
  CHECK(replies.field(1).kind == 'l' && replies.field(1).number == 2);
  CHECK(replies.field(2).bytes == "/a");
  CHECK(replies.field(3).bytes.empty());
  CHECK(replies.field(4).number == 1);
  replies.take();
  CHECK(replies.held().empty());
  CHECK(program.blocked > 0);
}

void long_values_both_ways() {
  const ClientAndServer ends;
  SocketConnection connection(ends.client.get());
  Program program;
  const std::string content(3 * 1024 * 1024 + 1, 'x');
  std::thread server([&] {
    std::string got(content.size(), '\0');
    CHECK(::recv(ends.server.get(), got.data(), got.size(), MSG_WAITALL) == static_cast<ssize_t>(got.size()));
    CHECK(got == content);
    ends.say(text(got));
  });
  connection.send(content, soon(), program);
  Replies& replies = connection.await("v", soon(), program);
  CHECK(replies.field(0).bytes == content);
  replies.take();
  server.join();
}

void what_cannot_be() {
  for (const auto& [form, said] : {std::pair{"v", number<std::uint64_t>(std::uint64_t{1} << 41)},
                                   std::pair{"l", number<std::int64_t>(-1)}}) {
    const ClientAndServer ends;
    SocketConnection connection(ends.client.get());
    Program program;
    ends.say(said);
    const Error error = error_of([&] { connection.await(form, soon(), program); });
    CHECK(error.kind() == ErrorKind::network);
    CHECK(error.message().find("cannot be") != std::string::npos);
  }
}

void ends_of_waits() {
  ClientAndServer ends;
  SocketConnection connection(ends.client.get());
  Program program;
  CHECK(error_of([&] { connection.await("b", now_ns() + kMillisecond, program); }).kind() ==
        ErrorKind::timeout);
  // The answer is still due, and is found later.
  ends.say(number<char>(0) + number<char>(1));
  Replies& replies = connection.await("bb", soon(), program);
  CHECK(replies.field(0).number == 0);
  CHECK(replies.field(1).number == 1);
  replies.take();
  Program gives_up(true);
  CHECK(error_of([&] { connection.await("b", soon(), gives_up); }).kind() == ErrorKind::interrupted);
  ends.server.reset();
  CHECK(error_of([&] { connection.await("b", soon(), program); }).kind() == ErrorKind::network);
}

int listening() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  CHECK(fd >= 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::bind(fd, reinterpret_cast<const sockaddr*>(&any), sizeof(any)) == 0);
  CHECK(::listen(fd, 4) == 0);
  return fd;
}

std::string greeting() { return command(Command::kValidate) + number(store::kMagic); }

void in_the_servers_process() {
  constexpr int kThreads = 4;
  constexpr int kTimes = 500;
  auto server = std::make_unique<store::Server>(std::vector<int>{listening()}, 64 * 1024 * 1024);
  const std::string add = command(Command::kAdd) + text("/n") + number<std::int64_t>(1);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      LocalConnection client(server->loop());
      Program program;
      client.send(greeting(), soon(), program);
      for (int j = 0; j < kTimes; ++j) {
        client.send(add, soon(), program);
        client.await("n", soon(), program).take();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  LocalConnection client(server->loop());
  Program program;
  client.send(greeting() + command(Command::kGet) + text("/n"), soon(), program);
  Replies& replies = client.await("v", soon(), program);
  CHECK(replies.field(0).bytes == std::to_string(kThreads * kTimes));
  replies.take();
  // A request that cannot be carried out ends the connection, behind the replies to what came before.
  client.send(command(Command::kQueueLen) + text("/q") + command(Command::kValidate) + number(store::kMagic),
              soon(), program);
  client.await("n", soon(), program).take();
  CHECK(error_of([&] { client.await("n", soon(), program); }).kind() == ErrorKind::network);
  LocalConnection other(server->loop());
  server.reset();
  other.send(greeting() + add, soon(), program);
  CHECK(error_of([&] { other.await("n", soon(), program); }).kind() == ErrorKind::network);
}

int connected_to(int listener) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  CHECK(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(fd >= 0);
  CHECK(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

// A client whose reply cannot be encrypted loses its connection; the server serves the others.
void replies_that_cannot_be_encrypted() {
  const std::string key(32, 'k');
  const int listener = listening();
  const store::Server server({listener}, 64 * 1024 * 1024, {.key = key, .encryption = store::Encryption::on});
  const Descriptor socket(connected_to(listener));
  SocketConnection client(socket.get());
  Program program;
  CHECK(client.prove(key, true, soon(), program) == SocketConnection::Proved::both);
  client.send(greeting() + command(Command::kPing) + number<std::uint32_t>(7), soon(), program);
  client.await("u", soon(), program).take();
  client.send(command(Command::kWait) + number<std::uint64_t>(1) + text("/k"), soon(), program);
  LocalConnection other(server.loop());
  other.send(greeting(), soon(), program);
  while (server.waiting() == 0) std::this_thread::yield();
  {
    const RefusingLibcrypto refuses(0);
    other.send(command(Command::kSet) + text("/k") + text("value"), soon(), program);
    other.send(command(Command::kPing) + number<std::uint32_t>(8), soon(), program);
    other.await("u", soon(), program).take();
    CHECK(error_of([&] { client.await("b", soon(), program); }).kind() == ErrorKind::network);
  }
  const Descriptor again(connected_to(listener));
  CHECK(SocketConnection(again.get()).prove(key, true, soon(), program) == SocketConnection::Proved::both);
}

}  // namespace

Tests store_client_tests() {
  return {{"store client: replies in pieces", replies_in_pieces},
          {"store client: long values both ways", long_values_both_ways},
          {"store client: what cannot be", what_cannot_be},
          {"store client: ends of waits", ends_of_waits},
          {"store client: in the server's process", in_the_servers_process},
          {"store client: replies that cannot be encrypted", replies_that_cannot_be_encrypted}};
}

}  // namespace collectives
