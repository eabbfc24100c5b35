// Messages with descriptors over a unix socket in the abstract namespace: it has no file, so nothing is left
// behind.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <cstddef>
#include <string>
#include <vector>

#include "common/clock.hpp"
#include "memory/descriptor.hpp"

namespace collectives {

// At most this many descriptors travel with one message (the kernel's limit is 253).
inline constexpr std::size_t kMostDescriptors = 200;

struct Received {
  std::size_t bytes = 0;  // 0: the peer closed the connection
  std::vector<Descriptor> descriptors;
};

Descriptor listen_abstract(const std::string& name, int backlog);

// Waits until a peer connects; an empty descriptor when the deadline passed.
Descriptor accept_until(const Descriptor& listener, Nanoseconds deadline);

// Throws ErrorKind::peer_lost where nobody listens under that name. All of these throw ErrorKind::resources
// where the system gives no descriptor or memory.
Descriptor connect_abstract(const std::string& name, Nanoseconds deadline);

// User id of the process at the other end, as the kernel tells it.
uid_t peer_user(const Descriptor& socket);
// Its process id as counted here; 0 where it has none.
int peer_process(const Descriptor& socket);

// Sends one message whole, with `descriptors` attached. Throws ErrorKind::peer_lost where the peer is gone,
// and ErrorKind::timeout after the deadline.
void send_message(const Descriptor& socket, const void* bytes, std::size_t size,
                  const std::vector<int>& descriptors, Nanoseconds deadline);

// Receives one message of at most `capacity` bytes.
Received receive_message(const Descriptor& socket, void* bytes, std::size_t capacity, Nanoseconds deadline);

// Waits until something happens to one of them before the deadline; sets their `revents`.
bool poll_until(std::vector<pollfd>& watched, Nanoseconds deadline);

// Whether something can be read (or the peer is gone) before the deadline.
bool readable_until(const Descriptor& socket, Nanoseconds deadline);

}  // namespace collectives
