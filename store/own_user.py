"""Whom a process without a job secret trusts: other processes of its user, on its machine."""

from __future__ import annotations

import os

import collectives._native as _native
from collectives.errors import DistNetworkError
from collectives.secret import WAY_OUT, derived_key, is_insecure

__all__ = ["own_user_only"]


def own_user_only() -> bool:
    """Returns whether connections of other users, and of other machines, are refused.

    Raises:
        DistNetworkError: they would have to be, and the kernel cannot tell other users from this one.
    """
    if derived_key("user") is not None or is_insecure():
        return False
    user = os.geteuid()
    if not _native.is_own_user(user):
        raise DistNetworkError(
            f"this process runs as user {user}, as do all users whom its user namespace does not know (see "
            "/proc/self/uid_map), so that the processes of this job cannot be told from those of others "
            f"without a job secret; {WAY_OUT}"
        )
    return True
