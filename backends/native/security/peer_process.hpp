// Whether a process of this machine is this user's.
#pragma once

#include <sys/types.h>

namespace collectives {

enum class PeerProcess {
  of_this_user,
  of_another_user,
  elsewhere,  // on another machine or in another network namespace; or the connection has ended
  unknown,    // this process has too few descriptors, or memory, to ask; `errno` says which
};

// Whose process is at the other end of a TCP connection, as the kernel says: sock_diag(7), or /proc/net where
// there is none. For a connection that both ends have taken.
PeerProcess peer_process(int socket);

// Whether a number of a user, as the kernel tells it of a process or of a file, stands for this process's
// user. In a user namespace that does not know all users, those whom it does not know have one number in
// common, the overflow user id (user_namespaces(7)): it stands for nobody, though it is this process's, too.
bool is_own_user(uid_t user);

// Whether a TCP connection stays on this machine, as the addresses of its ends say: both are loopback, or
// both are the same. What comes from the network with such an address is dropped by the kernel.
bool within_machine(int socket);

}  // namespace collectives
