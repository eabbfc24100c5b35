#include "security/peer_process.hpp"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

namespace collectives {
namespace {

// Fills in one end of a connection; returns its family, or 0 where it is no connection of TCP.
using NameOf = int (*)(int, sockaddr*, socklen_t*);

std::uint8_t read_end(NameOf name_of, int socket, __be32* address, __be16& port) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (name_of(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return 0;
  if (storage.ss_family == AF_INET) {
    const auto& inet = reinterpret_cast<const sockaddr_in&>(storage);
    address[0] = inet.sin_addr.s_addr;
    port = inet.sin_port;
    return AF_INET;
  }
  if (storage.ss_family != AF_INET6) return 0;
  const auto& inet = reinterpret_cast<const sockaddr_in6&>(storage);
  port = inet.sin6_port;
  if (IN6_IS_ADDR_V4MAPPED(&inet.sin6_addr)) {  // the kernel looks for IPv4, whichever kind of socket
    std::memcpy(address, inet.sin6_addr.s6_addr + 12, 4);
    return AF_INET;
  }
  std::memcpy(address, &inet.sin6_addr, 16);
  return AF_INET6;
}

// A connection as the socket at one of its ends sees it.
struct Ends {
  std::uint8_t family = 0;
  __be32 source[4] = {};
  __be32 peer[4] = {};
  __be16 source_port = 0;
  __be16 peer_port = 0;

  Ends seen_from_the_other() const {
    Ends other = *this;
    std::swap(other.source, other.peer);
    std::swap(other.source_port, other.peer_port);
    return other;
  }
};

// What the kernel knows of the socket at an end.
struct Found {
  unsigned state = 0;
  std::uint64_t inode = 0;
  unsigned user = 0;
};

struct Question {
  nlmsghdr header;
  inet_diag_req_v2 request;
};

bool is_of_resources(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

// Asks sock_diag(7). Nothing where it knows no such socket, or does not exist; throws where there are no
// resources to ask.
std::optional<Found> ask(const Ends& ends) {
  Question question{};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  inet_diag_sockid& id = question.request.id;
  std::fill(std::begin(id.idiag_cookie), std::end(id.idiag_cookie), INET_DIAG_NOCOOKIE);
  std::copy(std::begin(ends.source), std::end(ends.source), id.idiag_src);
  std::copy(std::begin(ends.peer), std::end(ends.peer), id.idiag_dst);
  id.idiag_sport = ends.source_port;
  id.idiag_dport = ends.peer_port;
  question.request.sdiag_family = ends.family;
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0U;
  const int link = ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (link < 0 && is_of_resources(errno)) throw std::system_error(errno, std::generic_category());
  if (link < 0) return std::nullopt;
  alignas(nlmsghdr) std::byte bytes[4096] = {};
  // It answers before `send` returns.
  ssize_t got = ::send(link, &question, sizeof(question), 0);
  if (got == static_cast<ssize_t>(sizeof(question))) got = ::recv(link, bytes, sizeof(bytes), MSG_DONTWAIT);
  ::close(link);
  nlmsghdr header{};
  inet_diag_msg answer{};
  if (got < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(answer)))) return std::nullopt;
  std::memcpy(&header, bytes, sizeof(header));
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY) return std::nullopt;
  std::memcpy(&answer, bytes + NLMSG_HDRLEN, sizeof(answer));
  return Found{answer.idiag_state, answer.idiag_inode, answer.idiag_uid};
}

// An address and port as /proc/net/tcp and tcp6 show them: words as they lie in memory, then the port.
std::string shown(const __be32* address, std::size_t words, __be16 port) {
  std::array<char, 48> text{};
  std::string all;
  for (std::size_t i = 0; i < words; ++i) {
    std::snprintf(text.data(), text.size(), "%08X", static_cast<unsigned>(address[i]));
    all += text.data();
  }
  std::snprintf(text.data(), text.size(), ":%04X", static_cast<unsigned>(ntohs(port)));
  return all + text.data();
}

std::optional<Found> look_up(const char* path, const std::string& source, const std::string& peer) {
  std::ifstream table(path);
  if (!table && is_of_resources(errno)) throw std::system_error(errno, std::generic_category());
  std::string line;
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string number, here, there, state, queues, timer, retransmits, user, timeout, inode;
    fields >> number >> here >> there >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
    if (!fields || here != source || there != peer) continue;
    Found found;
    const auto parse = [](const std::string& text, auto& value, int base) {
      return std::from_chars(text.data(), text.data() + text.size(), value, base).ec == std::errc{};
    };
    if (parse(state, found.state, 16) && parse(user, found.user, 10) && parse(inode, found.inode, 10))
      return found;
  }
  return std::nullopt;
}

// Reads the kernel's tables instead, for kernels and containers without sock_diag. They grow with the number
// of connections on this machine.
std::optional<Found> look_up(const Ends& ends) {
  const auto both = [&](const char* path, const __be32* source, const __be32* peer, std::size_t words) {
    return look_up(path, shown(source, words, ends.source_port), shown(peer, words, ends.peer_port));
  };
  constexpr const char* kTable6 = "/proc/thread-self/net/tcp6";
  if (ends.family == AF_INET6) return both(kTable6, ends.source, ends.peer, 4);
  if (const auto found = both("/proc/thread-self/net/tcp", ends.source, ends.peer, 1)) return found;
  const __be32 source[4] = {0, 0, htonl(0xffff), ends.source[0]};  // a socket of IPv6 that speaks IPv4
  const __be32 peer[4] = {0, 0, htonl(0xffff), ends.peer[0]};
  return both(kTable6, source, peer, 4);
}

}  // namespace

PeerProcess peer_process(int socket) try {
  Ends own;
  own.family = read_end(::getsockname, socket, own.source, own.source_port);
  if (own.family == 0 || read_end(::getpeername, socket, own.peer, own.peer_port) != own.family)
    return PeerProcess::elsewhere;
  const Ends other = own.seen_from_the_other();
  std::optional<Found> found = ask(other);
  // This end is there, so that who does not know it knows no sockets.
  if (!found && !ask(own)) found = look_up(other);
  // A socket that its process has closed belongs to nobody, and shows as root's.
  if (!found || found->state != TCP_ESTABLISHED || found->inode == 0) return PeerProcess::elsewhere;
  return is_own_user(found->user) ? PeerProcess::of_this_user : PeerProcess::of_another_user;
} catch (const std::system_error& error) {
  errno = error.code().value();
  return PeerProcess::unknown;
}

namespace {

uid_t overflow_user() {
  uid_t user = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> user;
  return user;
}

bool knows_all_users() {
  std::ifstream map("/proc/self/uid_map");
  std::uint64_t here = 1;
  std::uint64_t outside = 1;
  std::uint64_t count = 0;
  map >> here >> outside >> count;
  return map && here == 0 && outside == 0 && count == std::numeric_limits<std::uint32_t>::max();
}

}  // namespace

bool is_own_user(uid_t user) {
  if (user != ::geteuid()) return false;
  static const uid_t kOverflow = overflow_user();
  return user != kOverflow || knows_all_users();
}

bool within_machine(int socket) {
  Ends own;
  __be16 port = 0;
  own.family = read_end(::getsockname, socket, own.source, port);
  if (own.family == 0 || read_end(::getpeername, socket, own.peer, port) != own.family) return false;
  if (std::equal(std::begin(own.source), std::end(own.source), std::begin(own.peer))) return true;
  const auto is_loopback = [&](const __be32* address) {
    constexpr unsigned kLoopback = 127;
    if (own.family == AF_INET) return ntohl(address[0]) >> 24 == kLoopback;
    return std::memcmp(address, &in6addr_loopback, sizeof(in6addr_loopback)) == 0;
  };
  return is_loopback(own.source) && is_loopback(own.peer);
}

}  // namespace collectives
