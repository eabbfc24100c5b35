// Connections between machines, and the addresses they are made with. All sockets are non-blocking.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/descriptor.hpp"

namespace collectives {

// A numeric address, IPv4 or IPv6 (with its scope where it has one), and a port.
struct Endpoint {
  std::string address;
  std::uint16_t port = 0;

  // "10.0.0.1:4711", "[fe80::1%eth0]:4711".
  std::string text() const;
};

// One address of a network interface of this machine.
struct Interface {
  std::string name;
  std::string address;
  bool loopback = false;
};

// The addresses of all interfaces that are up, in the kernel's order.
std::vector<Interface> interfaces();

struct Listener {
  Descriptor socket;
  Endpoint endpoint;
};

// Lets the system choose.
inline constexpr std::array<std::uint16_t, 1> kAnyPort{0};

// Listens on exactly this address, on the first of the ports that is free. Throws ErrorKind::network.
Listener listen_tcp(const std::string& address, int backlog, std::span<const std::uint16_t> ports = kAnyPort);

// The next connection that waits; an empty descriptor, and errno, where none does or it cannot be taken.
Descriptor accept_tcp(const Descriptor& listener) noexcept;

// Begins to connect, from an address of this machine where `from` is not empty. Throws ErrorKind::network
// where not even that is possible.
Descriptor begin_connect(const Endpoint& to, const std::string& from);

// Once the socket of `begin_connect` is writable: 0 where it is connected, else the number of the error.
int connect_error(const Descriptor& socket) noexcept;

// Makes the kernel send what is written at once, without waiting for more.
void send_at_once(const Descriptor& socket) noexcept;

// Lets the kernel find out, within a few seconds, that the other machine is gone, even where nothing is sent
// and the process at the other end is stopped.
void keep_alive(const Descriptor& socket) noexcept;

// Lets the kernel repeat what is not acknowledged at equal intervals, six times, before it doubles them: for
// connections on which little is sent, so that a lossy network is not taken for one that is gone.
void repeat_steadily(const Descriptor& socket) noexcept;

// Bytes that were sent, and that the other end's kernel has not acknowledged.
std::uint64_t unacknowledged_bytes(const Descriptor& socket) noexcept;

}  // namespace collectives
