#include "store/outcasts.hpp"

#include <netdb.h>
#include <netinet/in.h>

namespace collectives::store {

void Outcasts::add(int socket) noexcept {
  count_.fetch_add(1, std::memory_order_relaxed);
  sockaddr_storage from{};
  socklen_t size = sizeof(from);
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&from), &size) != 0) return;
  const std::lock_guard<std::mutex> locked(lock_);
  last_ = from;
}

std::string Outcasts::last() const {
  sockaddr_storage from;
  {
    const std::lock_guard<std::mutex> locked(lock_);
    from = last_;
  }
  char host[NI_MAXHOST] = "";
  const auto size =
      static_cast<socklen_t>(from.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
  if (from.ss_family == AF_UNSPEC || ::getnameinfo(reinterpret_cast<const sockaddr*>(&from), size, host,
                                                   sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  const std::string text(host);
  const std::string mapped = "::ffff:";  // IPv4, on a socket for both
  return text.compare(0, mapped.size(), mapped) == 0 ? text.substr(mapped.size()) : text;
}

}  // namespace collectives::store
