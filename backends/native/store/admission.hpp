// Who may be a client of a server.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.hpp"
#include "security/handshake.hpp"
#include "store/table.hpp"

namespace collectives::store {

// The rule; without a key and `own_user_only`, everybody may.
struct Admission {
  std::string key;             // clients prove that they know it, and the server does; empty without a proof
  bool own_user_only = false;  // only processes of this user on this machine
};

// Applies the rule to new connections, and knows which of them have not proved themselves yet.
class Door {
 public:
  explicit Door(Admission admission) : admission_(std::move(admission)) {}

  // Whether a connection may stay. Empties `handshake` where none is asked for.
  bool admits(int socket, ClientId client, std::optional<Handshake>& handshake);

  // Goes on with the handshake of a connection, and empties it once the client is taken. Returns whether the
  // connection may stay.
  static bool go_on(int socket, std::optional<Handshake>& handshake);

  // Clients whose time for a proof is over, proved or not; each once.
  std::vector<ClientId> overdue();

  // Milliseconds until the next one; -1 where there is none.
  int wait_ms() const;

 private:
  Admission admission_;
  std::deque<std::pair<Nanoseconds, ClientId>> deadlines_;  // in the order of their coming
};

}  // namespace collectives::store
