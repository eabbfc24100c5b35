// Whether a number of a user, as the kernel tells it of a process or of a file, stands for this process's
// user.
#pragma once

#include <sys/types.h>

namespace collectives {

// In a user namespace that does not know all users, those whom it does not know have one number in common,
// the overflow user id (user_namespaces(7)): it stands for nobody, though it is this process's, too.
bool is_own_user(uid_t user);

}  // namespace collectives
