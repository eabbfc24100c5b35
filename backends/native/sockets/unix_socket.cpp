#include "sockets/unix_socket.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>

#include "common/error.hpp"

namespace collectives {
namespace {

// A full backlog or a signal is no failure; the connection is tried again after this long.
constexpr Nanoseconds kRetry = 2 * kMillisecond;

[[noreturn]] void fail(const std::string& what, int error) {
  const std::string text = with_errno("unix socket: " + what, error);
  if (error == EMFILE || error == ENFILE)
    throw Error(ErrorKind::resources, text + "; raise the limit on open files (ulimit -n)");
  throw Error(error == ENOMEM || error == ENOBUFS ? ErrorKind::resources : ErrorKind::network, text);
}

socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address = sockaddr_un{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path))
    throw Error(ErrorKind::network, "unix socket: name too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero makes the name abstract
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Descriptor make_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail("cannot make one", errno);
  return socket;
}

ucred peer_credentials(const Descriptor& socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
    fail("no peer credentials", errno);
  return peer;
}

bool poll_until(pollfd* watched, std::size_t count, Nanoseconds deadline) {
  for (;;) {
    const Nanoseconds left = deadline == kNever ? kNever : deadline - now_ns();
    const auto timeout = std::clamp<Nanoseconds>((left + kMillisecond - 1) / kMillisecond, 0, INT_MAX);
    const int ready = ::poll(watched, count, left == kNever ? -1 : static_cast<int>(timeout));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail("poll failed", errno);
    if (ready == 0 && left <= 0) return false;
  }
}

bool poll_until(int fd, short events, Nanoseconds deadline) {
  pollfd waiting{.fd = fd, .events = events, .revents = 0};
  return poll_until(&waiting, 1, deadline);
}

}  // namespace

bool poll_until(std::vector<pollfd>& watched, Nanoseconds deadline) {
  return poll_until(watched.data(), watched.size(), deadline);
}

Descriptor listen_abstract(const std::string& name, int backlog) {
  Descriptor socket = make_socket();
  sockaddr_un address;
  const socklen_t size = address_of(name, address);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0)
    fail("cannot bind", errno);
  if (::listen(socket.get(), backlog) != 0) fail("cannot listen", errno);
  return socket;
}

Descriptor accept_until(const Descriptor& listener, Nanoseconds deadline) {
  while (poll_until(listener.get(), POLLIN, deadline)) {
    Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) return socket;
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) fail("cannot accept", errno);
  }
  return {};
}

Descriptor connect_abstract(const std::string& name, Nanoseconds deadline) {
  Descriptor socket = make_socket();
  sockaddr_un address;
  const socklen_t size = address_of(name, address);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    if (errno == ECONNREFUSED)
      throw Error(ErrorKind::peer_lost, with_errno("unix socket: nobody listens", errno));
    if (errno != EAGAIN && errno != EINTR) fail("cannot connect", errno);
    if (now_ns() >= deadline)
      throw Error(ErrorKind::timeout, "unix socket: no connection before the deadline");
    const timespec pause{0, kRetry};
    ::nanosleep(&pause, nullptr);
  }
  return socket;
}

uid_t peer_user(const Descriptor& socket) { return peer_credentials(socket).uid; }

int peer_process(const Descriptor& socket) { return peer_credentials(socket).pid; }

void send_message(const Descriptor& socket, const void* bytes, std::size_t size,
                  const std::vector<int>& descriptors, Nanoseconds deadline) {
  iovec data{.iov_base = const_cast<void*>(bytes), .iov_len = size};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  if (!descriptors.empty()) {
    const std::size_t payload = descriptors.size() * sizeof(int);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(payload);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(payload);
    std::memcpy(CMSG_DATA(header), descriptors.data(), payload);
  }
  for (;;) {
    if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) >= 0) return;
    if (errno == EPIPE || errno == ECONNRESET) {
      throw Error(ErrorKind::peer_lost, with_errno("unix socket: the peer is gone", errno));
    }
    if (errno != EAGAIN && errno != EINTR) fail("cannot send", errno);
    if (!poll_until(socket.get(), POLLOUT, deadline)) {
      throw Error(ErrorKind::timeout, "unix socket: the peer did not read before the deadline");
    }
  }
}

Received receive_message(const Descriptor& socket, void* bytes, std::size_t capacity, Nanoseconds deadline) {
  for (;;) {
    iovec data{.iov_base = bytes, .iov_len = capacity};
    alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))];
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t size = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == ECONNRESET) return {};
    if (size < 0 && errno != EAGAIN && errno != EINTR) fail("cannot receive", errno);
    if (size < 0) {
      if (!poll_until(socket.get(), POLLIN, deadline)) {
        throw Error(ErrorKind::timeout, "unix socket: the peer did not answer before the deadline");
      }
      continue;
    }
    Received received;
    received.bytes = static_cast<std::size_t>(size);
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        received.descriptors.emplace_back(fd);
      }
    }
    if ((message.msg_flags & MSG_CTRUNC) != 0 && received.descriptors.size() < kMostDescriptors)
      fail("a descriptor came that cannot be kept", EMFILE);
    if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
      throw Error(ErrorKind::network, "unix socket: a message did not fit");
    return received;
  }
}

bool readable_until(const Descriptor& socket, Nanoseconds deadline) {
  return poll_until(socket.get(), POLLIN, deadline);
}

}  // namespace collectives
