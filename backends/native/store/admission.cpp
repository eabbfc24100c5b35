#include "store/admission.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "security/peer_process.hpp"
#include "store/protocol.hpp"

namespace collectives::store {
namespace {

constexpr Nanoseconds kProofLimit = 2 * kSecond;

}  // namespace

bool Door::admits(int socket, ClientId client, std::optional<Handshake>& handshake) {
  if (admission_.own_user_only) return peer_process(socket) == PeerProcess::of_this_user;
  if (admission_.key.empty()) return true;
  handshake = Handshake::accept(admission_.key, kHello, std::strlen(kHello));
  deadlines_.emplace_back(now_ns() + kProofLimit, client);
  return true;
}

bool Door::go_on(int socket, std::optional<Handshake>& handshake) {
  switch (handshake->step(socket)) {
    case Handshake::Status::goes_on:
      return true;
    case Handshake::Status::asks: {
      const bool taken = handshake->confirm(socket);
      handshake.reset();
      return taken;
    }
    default:
      if (!handshake->greeted()) {
        static_cast<void>(
            ::send(socket, kProofWanted, std::strlen(kProofWanted), MSG_NOSIGNAL | MSG_DONTWAIT));
      }
      return false;
  }
}

std::vector<ClientId> Door::overdue() {
  std::vector<ClientId> found;
  const Nanoseconds now = now_ns();
  for (; !deadlines_.empty() && deadlines_.front().first <= now; deadlines_.pop_front()) {
    found.push_back(deadlines_.front().second);
  }
  return found;
}

int Door::wait_ms() const {
  if (deadlines_.empty()) return -1;
  const Nanoseconds left = std::max<Nanoseconds>(deadlines_.front().first - now_ns(), 0);
  return static_cast<int>((left + kMillisecond - 1) / kMillisecond);
}

}  // namespace collectives::store
