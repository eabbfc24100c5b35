// The connections of a leader, against peers that this test plays.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "memory/descriptor.hpp"
#include "security/handshake.hpp"
#include "sockets/congestion_control.hpp"
#include "tests/ranks.hpp"
#include "tests/refusing_libcrypto.hpp"

namespace collectives {
namespace {

constexpr std::string_view kMeshKey = "0123456789abcdef0123456789abcdef";

// One of two ranks, each on a machine of its own.
std::unique_ptr<Group> leader(int rank, Listener own, const Listener& other, bool encrypts = false) {
  Membership membership;
  membership.rank = rank;
  membership.size = 2;
  membership.layout = SegmentLayout(shape_for(2, true));
  membership.segment = std::make_shared<Segment>(Segment::create_private(membership.layout.total_bytes()));
  membership.tuning = tuning_between_machines(default_tuning(2), membership.layout.shape().slot_bytes);
  membership.processes.resize(2);
  membership.leader_event = make_event();
  Network network;
  network.key = kMeshKey;
  network.encrypts = encrypts;
  network.endpoints = {{own.endpoint}, {other.endpoint}};
  if (rank == 1) std::swap(network.endpoints.front(), network.endpoints.back());
  network.listeners.push_back(std::move(own));
  membership.span(make_topology({{0}, {1}}, {"first", "second"}, rank), std::move(network), 2);
  return std::make_unique<Group>(std::move(membership), "leaders", kLimit, new_record());
}

void wait_for(const Descriptor& socket, short events) {
  pollfd waiting{.fd = socket.get(), .events = events, .revents = 0};
  CHECK(::poll(&waiting, 1, 60'000) == 1);
}

void send_all(const Descriptor& socket, const void* bytes, std::size_t size) {
  wait_for(socket, POLLOUT);
  CHECK(::send(socket.get(), bytes, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
}

// A connection of rank 1, as ConnectionManager expects it; empty where that drops it.
Descriptor dial(const Endpoint& endpoint, const Hello& hello = {.from = 1, .size = 2},
                std::string_view key = kMeshKey, CipherSuite suite = CipherSuite::none) {
  Descriptor socket = begin_connect(endpoint, "");
  wait_for(socket, POLLOUT);
  Handshake handshake = dialling(std::string(key), hello, suite);
  for (;;) {
    const Handshake::Status status = handshake.step(socket.get());
    if (status == Handshake::Status::proved) return socket;
    if (status == Handshake::Status::refused) return {};
    wait_for(socket, POLLIN);
  }
}

// Whoever has no proof gets into no slot, and nobody into a slot again and again; the group goes on.
void test_strangers_at_the_port() {
  Listener own = listen_tcp("127.0.0.1", 16);
  const Endpoint endpoint = own.endpoint;
  const Listener other = listen_tcp("127.0.0.1", 16);
  const std::unique_ptr<Group> group = leader(0, std::move(own), other);
  const Descriptor silent = begin_connect(endpoint, "");
  CHECK(!dial(endpoint, {}, std::string(32, 'x')));
  const auto no_purpose = std::bit_cast<Purpose>(std::uint32_t{9});
  for (const Hello& wrong :
       {Hello{.from = 0, .size = 2}, Hello{.from = 7, .size = 2}, Hello{.from = -1, .size = 2},
        Hello{.from = 1, .to = 1, .size = 2}, Hello{.from = 1, .size = 3},
        Hello{.from = 1, .size = 2, .purpose = Purpose::memory},
        Hello{.from = 1, .size = 2, .purpose = no_purpose}, Hello{.from = 1, .size = 2, .index = -1},
        Hello{.from = 1, .size = 2, .index = 1000}, Hello{.version = 1, .from = 1, .size = 2}}) {
    CHECK(!dial(endpoint, wrong));
  }
  const Descriptor garbage = begin_connect(endpoint, "");
  const std::string noise(100'000, '\x7f');
  wait_for(garbage, POLLOUT);
  static_cast<void>(::send(garbage.get(), noise.data(), noise.size(), MSG_NOSIGNAL));
  const Descriptor peer = dial(endpoint);
  CHECK(static_cast<bool>(peer));
  CHECK(group->connect(deadline_after(kLimit)).empty());
  const Descriptor again = dial(endpoint);  // where the first connection may have been reset
  CHECK(static_cast<bool>(again));
  CHECK(!dial(endpoint));
  for (const Descriptor* stranger : {&silent, &garbage}) {
    wait_for(*stranger, POLLIN);  // the silent one after its two seconds
    std::array<char, 8> bytes{};
    CHECK(::recv(stranger->get(), bytes.data(), bytes.size(), 0) <= 0);
  }
  group->fail({ErrorKind::aborted, "the test is over"});
}

// Nor does a stranger's hello end the group where libcrypto makes no key for the answer.
void test_strangers_where_no_key_is_made() {
  Listener own = listen_tcp("127.0.0.1", 16);
  const Endpoint endpoint = own.endpoint;
  const Listener other = listen_tcp("127.0.0.1", 16);
  const std::unique_ptr<Group> group = leader(0, std::move(own), other, true);
  const Descriptor stranger = begin_connect(endpoint, "");
  wait_for(stranger, POLLOUT);
  Handshake handshake = dialling(std::string(32, 'x'), {.from = 1, .size = 2}, CipherSuite::aes_256_gcm);
  {
    const RefusingLibcrypto refuses(0);
    static_cast<void>(handshake.step(stranger.get()));
    wait_for(stranger, POLLIN);  // dropped
  }
  CHECK(group->connection_error().find("makes no key") != std::string::npos);
  CHECK(static_cast<bool>(dial(endpoint, {.from = 1, .size = 2}, kMeshKey, CipherSuite::aes_256_gcm)));
  CHECK(group->connect(deadline_after(kLimit)).empty());
  group->fail({ErrorKind::aborted, "the test is over"});
}

// Whoever takes connections and drops them, such as a rank that is too busy for a proof, is not dead.
void test_dropped_handshakes() {
  Listener own = listen_tcp("127.0.0.1", 16);
  const Listener other = listen_tcp("127.0.0.1", 16);
  const std::unique_ptr<Group> group = leader(1, std::move(own), other);
  Descriptor socket;
  const Nanoseconds until = now_ns() + 2 * kSecond;
  do {
    socket.reset();  // with its hello unread
    wait_for(other.socket, POLLIN);
    socket = accept_tcp(other.socket);
    wait_for(socket, POLLIN);
  } while (now_ns() < until);
  Handshake handshake = Handshake::accept(std::string(kMeshKey), "", sizeof(Hello), {});
  while (handshake.step(socket.get()) == Handshake::Status::goes_on) wait_for(socket, POLLIN);
  CHECK(handshake.confirm(socket.get()));
  CHECK(group->connect(deadline_after(kLimit)).empty());
  group->fail({ErrorKind::aborted, "the test is over"});
}

// A leader that has announced its departure still gets pings, which it can answer no more: for a sanitizer.
void test_pings_after_departure() {
  Listener own = listen_tcp("127.0.0.1", 16);
  const Endpoint endpoint = own.endpoint;
  const Listener other = listen_tcp("127.0.0.1", 16);
  const std::unique_ptr<Group> group = leader(0, std::move(own), other);
  const Descriptor peer = dial(endpoint);
  CHECK(group->connect(deadline_after(kLimit)).empty());
  std::thread leaving([&] { group->shutdown(false); });
  for (ssize_t got = 1; got > 0;) {
    wait_for(peer, POLLIN);
    std::array<std::byte, 4096> bytes{};
    got = ::recv(peer.get(), bytes.data(), bytes.size(), 0);
  }
  struct Frame {
    std::uint32_t type = 4;  // ping
    std::uint32_t bytes = 0;
    std::int32_t rank = 1;
    std::uint32_t reserved = 0;
  };
  const std::array<Frame, 500> pings{};
  send_all(peer, pings.data(), sizeof(pings));
  leaving.join();
}

std::string congestion_control_of(const Descriptor& socket) {
  std::array<char, 16> name{};
  auto size = static_cast<socklen_t>(name.size() - 1);
  CHECK(::getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) == 0);
  return name.data();
}

// The other end is near, on this machine.
void test_congestion_control() {
  const Descriptor fresh(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::string chosen = congestion_control_of(fresh);  // by the system
  const Listener listener = listen_tcp("127.0.0.1", 16);
  const Descriptor dialled = begin_connect(listener.endpoint, "");
  wait_for(listener.socket, POLLIN);
  const Descriptor taken = accept_tcp(listener.socket);
  for (const Descriptor* const end : {&dialled, &taken}) {
    return_to_bbr_where_far(*end);
    const std::string found = congestion_control_of(*end);
    CHECK(chosen.starts_with("bbr") ? found == "cubic" || found == "reno" : found == chosen);
  }
}

}  // namespace

Tests transport_tests() {
  return {
      {"congestion control", test_congestion_control},
      {"dropped handshakes", test_dropped_handshakes},
      {"pings after departure", test_pings_after_departure},
      {"strangers at the port", test_strangers_at_the_port},
      {"strangers where no key is made", test_strangers_where_no_key_is_made},
  };
}

}  // namespace collectives
