// Whose process is at the other end of a TCP connection, where that is on this machine.
#pragma once

namespace collectives {

enum class PeerProcess {
  of_this_user,
  of_another_user,
  elsewhere,  // on another machine or in another network namespace; or the connection has ended
  unknown,    // this process has too few descriptors, or memory, to ask; `errno` says which
};

// As the kernel says: sock_diag(7), or /proc/net where there is none. For a connection that both ends have
// taken.
PeerProcess peer_process(int socket);

}  // namespace collectives
