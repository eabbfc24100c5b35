// The control channel of leaders, against a peer that this test plays.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

#include "memory/event.hpp"
#include "tests/ranks.hpp"

namespace collectives {
namespace {

constexpr std::string_view kSecret = "0123456789abcdef0123456789abcdef";

// Rank 0 of two machines with one rank each.
std::unique_ptr<Group> first_leader(Listener own, const Listener& other) {
  Membership membership;
  membership.size = 2;
  membership.layout = SegmentLayout(shape_for(2, true));
  membership.segment = std::make_shared<Segment>(Segment::create_private(membership.layout.total_bytes()));
  membership.tuning = tuning_between_machines(default_tuning(2), membership.layout.shape().slot_bytes);
  membership.processes.resize(2);
  membership.leader_event = make_event();
  Network network;
  network.secret = kSecret;
  network.endpoints = {{own.endpoint}, {other.endpoint}};
  network.listeners.push_back(std::move(own));
  membership.span(make_topology({{0}, {1}}, {"here", "there"}, 0), std::move(network));
  return std::make_unique<Group>(std::move(membership), "leaders", kLimit);
}

void wait_for(const Descriptor& socket, short events) {
  pollfd waiting{.fd = socket.get(), .events = events, .revents = 0};
  CHECK(::poll(&waiting, 1, 60'000) == 1);
}

void send_all(const Descriptor& socket, const void* bytes, std::size_t size) {
  wait_for(socket, POLLOUT);
  CHECK(::send(socket.get(), bytes, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
}

// The control connection of rank 1, which says hello as ConnectionManager expects it.
Descriptor dial(const Endpoint& endpoint) {
  Descriptor socket = begin_connect(endpoint, "");
  struct {
    std::uint64_t magic = kMagic;
    std::uint64_t version = kLayoutVersion;
    char secret[32] = {};
    std::int32_t rank = 1;
    std::int32_t size = 2;
    std::uint32_t purpose = 0;
    std::int32_t index = 0;
  } hello;
  std::memcpy(hello.secret, kSecret.data(), sizeof(hello.secret));
  send_all(socket, &hello, sizeof(hello));
  return socket;
}

// A leader that has announced its departure still gets pings, which it can answer no more: for a sanitizer.
void test_pings_after_departure() {
  Listener own = listen_tcp("127.0.0.1", 16);
  const Endpoint endpoint = own.endpoint;
  const Listener other = listen_tcp("127.0.0.1", 16);
  const std::unique_ptr<Group> group = first_leader(std::move(own), other);
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

}  // namespace

Tests transport_tests() {
  return {
      {"pings after departure", test_pings_after_departure},
  };
}

}  // namespace collectives
