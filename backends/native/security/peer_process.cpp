#include "security/peer_process.hpp"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

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

struct Question {
  nlmsghdr header;
  inet_diag_req_v2 request;
};

// The kernel's answer about the socket at one end of a connection; false where it knows none.
bool ask(const Question& question, inet_diag_msg& answer) {
  const int link = ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (link < 0) return false;
  alignas(nlmsghdr) std::byte bytes[4096] = {};
  // It answers before `send` returns.
  ssize_t got = ::send(link, &question, sizeof(question), 0);
  if (got == static_cast<ssize_t>(sizeof(question))) got = ::recv(link, bytes, sizeof(bytes), MSG_DONTWAIT);
  ::close(link);
  nlmsghdr header{};
  if (got < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(answer)))) return false;
  std::memcpy(&header, bytes, sizeof(header));
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY) return false;
  std::memcpy(&answer, bytes + NLMSG_HDRLEN, sizeof(answer));
  return true;
}

}  // namespace

PeerProcess peer_process(int socket) {
  Question question{};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  inet_diag_sockid& id = question.request.id;
  std::fill(std::begin(id.idiag_cookie), std::end(id.idiag_cookie), INET_DIAG_NOCOOKIE);
  // The source of the other end's socket is this end's peer.
  const std::uint8_t family = read_end(::getpeername, socket, id.idiag_src, id.idiag_sport);
  if (family == 0 || read_end(::getsockname, socket, id.idiag_dst, id.idiag_dport) != family)
    return PeerProcess::elsewhere;
  question.request.sdiag_family = family;
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0U;
  inet_diag_msg answer{};
  // A socket that its process has closed belongs to nobody, and shows as root's.
  if (!ask(question, answer) || answer.idiag_state != TCP_ESTABLISHED || answer.idiag_inode == 0)
    return PeerProcess::elsewhere;
  return answer.idiag_uid == ::geteuid() ? PeerProcess::of_this_user : PeerProcess::of_another_user;
}

}  // namespace collectives
