#include "store/admission.hpp"

#include <sys/socket.h>

#include <cstring>

#include "store/protocol.hpp"

namespace collectives::store {

static_assert(sizeof(kTurnedAway) - 1 + sizeof(kNoRoom) - 1 >= kNonceBytes);

PeerProcess Admission::peer(int socket) const {
  return own_user_only ? peer_process(socket) : PeerProcess::of_this_user;
}

std::optional<Handshake> Admission::handshake(int socket) const {
  if (!asks_proof()) return std::nullopt;
  const Handshake::Takes takes{
      .clear = encryption == Encryption::off ||
               (encryption == Encryption::between_machines && within_machine(socket)),
      // A client that is refused learns why.
      .encrypted = encryption != Encryption::off && can_encrypt(),
  };
  return Handshake::accept(key, kHello, std::strlen(kHello), takes);
}

bool go_on(int socket, std::optional<Handshake>& pending, Channel& channel) {
  if (!pending) return true;
  Handshake& handshake = *pending;
  const Handshake::Status status = handshake.step(socket);
  if (status == Handshake::Status::goes_on) return true;
  if (status == Handshake::Status::asks) {
    const bool taken = handshake.confirm(socket);
    if (taken) channel = handshake.channel(socket, kRecordsAtOnce);
    pending.reset();
    return taken;
  }
  if (!handshake.greeted()) {
    static_cast<void>(::send(socket, kProofWanted, std::strlen(kProofWanted), MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  return false;
}

}  // namespace collectives::store
