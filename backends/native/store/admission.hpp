// Who may be a client of a server.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "security/channel.hpp"
#include "security/handshake.hpp"
#include "security/peer_process.hpp"

namespace collectives::store {

// Which connections are encrypted.
enum class Encryption : std::uint8_t {
  between_machines = 0,  // those that leave the machine, and others where the client wants it
  off = 1,
  on = 2,
};

// The rule; without a key and `own_user_only`, everybody may.
struct Admission {
  std::string key;             // clients prove that they know it, and the server does; empty without a proof
  bool own_user_only = false;  // only processes of this user on this machine
  Encryption encryption = Encryption::between_machines;  // where there is a key

  bool asks_proof() const { return !key.empty(); }

  // Whose a connection is, where that decides whether it may stay; else this user's.
  PeerProcess peer(int socket) const;

  // What a new client has to go through before its first request; empty where no proof is asked for.
  std::optional<Handshake> handshake(int socket) const;
};

// Goes on with the handshake of a connection, and empties it once the client is taken, whose channel it
// makes. Returns whether the connection may stay. Until then no more is kept of it than a hello and a proof.
bool go_on(int socket, std::optional<Handshake>& pending, Channel& channel);

}  // namespace collectives::store
