#include "sockets/congestion_control.hpp"

#include <linux/tcp.h>  // netinet/tcp.h has an older tcp_info
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <string_view>

namespace collectives {

namespace {

constexpr unsigned kFarUs = 1000;

using Name = std::array<char, 16>;  // TCP_CA_NAME_MAX of the kernel; ends in a zero

// The name of a socket's congestion control; empty where the kernel does not tell.
Name name_of(int socket) noexcept {
  Name name{};
  auto size = static_cast<socklen_t>(name.size() - 1);
  static_cast<void>(::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size));
  return name;
}

bool take(int socket, std::string_view name) noexcept {
  return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size())) == 0;
}

bool is_bbr(const Name& name) noexcept { return std::string_view(name.data()).starts_with("bbr"); }

}  // namespace

void begin_without_bbr(const Descriptor& socket) noexcept {
  if (!is_bbr(name_of(socket.get()))) return;
  if (!take(socket.get(), "cubic")) take(socket.get(), "reno");  // which anybody may take on every kernel
}

void return_to_bbr_where_far(const Descriptor& socket) noexcept {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  // The shortest time, as others hold how long a process took to answer.
  if (info.tcpi_min_rtt < kFarUs) return;
  const Descriptor fresh(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));  // which has the system's choice
  const Name chosen = name_of(fresh.get());
  if (is_bbr(chosen)) take(socket.get(), chosen.data());
}

}  // namespace collectives
