#include "sockets/tcp_socket.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "common/error.hpp"
#include "sockets/congestion_control.hpp"

namespace collectives {
namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  sockaddr* get() noexcept { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
};

SocketAddress resolve(const Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code =
      ::getaddrinfo(endpoint.address.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (code != 0) {
    throw Error(ErrorKind::network,
                "'" + endpoint.address + "' is no address of this network: " + ::gai_strerror(code));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  return address;
}

std::string text_of(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(address, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text;
}

Descriptor make_socket(const SocketAddress& address) {
  Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!socket) throw Error(ErrorKind::network, with_errno("cannot make a socket", errno));
  begin_without_bbr(socket);
  return socket;
}

void set(const Descriptor& socket, int level, int option, int value) noexcept {
  // Where the kernel refuses, the connection works all the same.
  static_cast<void>(::setsockopt(socket.get(), level, option, &value, sizeof(value)));
}

}  // namespace

std::string Endpoint::text() const {
  const bool v6 = address.find(':') != std::string::npos;
  return (v6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) {
    throw Error(ErrorKind::network, with_errno("cannot list the network interfaces", errno));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, ::freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const auto size = static_cast<socklen_t>(family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    found.push_back({one->ifa_name, text_of(one->ifa_addr, size), (one->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return found;
}

Listener listen_tcp(const std::string& address, int backlog, std::span<const std::uint16_t> ports) {
  SocketAddress name;
  Descriptor socket;
  for (const std::uint16_t port : ports) {
    name = resolve({address, port});
    socket = make_socket(name);
    // Connections of an earlier group that linger in TIME_WAIT must not keep the port.
    if (port != 0) set(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    // Two sockets may be bound to one port until one of them listens.
    if (::bind(socket.get(), name.get(), name.size) == 0 && ::listen(socket.get(), backlog) == 0) break;
    if (errno != EADDRINUSE || port == 0) {
      throw Error(ErrorKind::network,
                  with_errno("cannot listen on " + Endpoint{address, port}.text(), errno));
    }
    socket.reset();
  }
  if (!socket) {
    throw Error(ErrorKind::network, "cannot listen on " + address + ": all " + std::to_string(ports.size()) +
                                        " ports of COLLECTIVES_PORT_RANGE are in use; each rank of this "
                                        "machine needs one for each group and interface");
  }
  name.size = sizeof(name.storage);
  if (::getsockname(socket.get(), name.get(), &name.size) != 0) {
    throw Error(ErrorKind::network, with_errno("cannot learn the port of " + address, errno));
  }
  const auto port = name.storage.ss_family == AF_INET
                        ? reinterpret_cast<const sockaddr_in*>(&name.storage)->sin_port
                        : reinterpret_cast<const sockaddr_in6*>(&name.storage)->sin6_port;
  return {std::move(socket), {address, ntohs(port)}};
}

Descriptor accept_tcp(const Descriptor& listener) noexcept {
  return Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

Descriptor begin_connect(const Endpoint& to, const std::string& from) {
  const SocketAddress name = resolve(to);
  Descriptor socket = make_socket(name);
  if (!from.empty()) {
    const SocketAddress own = resolve({from, 0});
#ifdef IP_BIND_ADDRESS_NO_PORT
    // The port is chosen with the destination in view, so that many connections do not use them up.
    set(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
#endif
    if (own.storage.ss_family == name.storage.ss_family && ::bind(socket.get(), own.get(), own.size) != 0) {
      throw Error(ErrorKind::network, with_errno("cannot connect from " + from, errno));
    }
  }
  if (::connect(socket.get(), name.get(), name.size) != 0 && errno != EINPROGRESS && errno != EINTR) {
    throw Error(ErrorKind::network, with_errno("cannot connect to " + to.text(), errno));
  }
  return socket;
}

int connect_error(const Descriptor& socket) noexcept {
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

void send_at_once(const Descriptor& socket) noexcept { set(socket, IPPROTO_TCP, TCP_NODELAY, 1); }

void keep_alive(const Descriptor& socket) noexcept {
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 2);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

void repeat_steadily(const Descriptor& socket) noexcept {
  constexpr char kReno[] = "reno";  // others, as BBR, take no notice of the next option; every kernel has it
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, kReno, sizeof(kReno) - 1);
  set(socket, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1);
}

std::uint64_t unacknowledged_bytes(const Descriptor& socket) noexcept {
  int queued = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &queued) == 0 ? static_cast<std::uint64_t>(queued) : 0;
}

}  // namespace collectives
