"""By which key the ranks of a host group recognise each other."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from collectives.errors import DistNetworkError
from collectives.secret import WAY_OUT, derived_key
from collectives.store.process import own_user_only, system

__all__ = ["check_system", "group_key", "random_key"]

_KEY_BYTES = 32


def check_system(first: str) -> None:
    """Refuses a group of ranks on several systems that have no secret in common.

    Args:
        first: the system of rank 0.

    Raises:
        DistNetworkError: this rank runs on another one, without a secret, and the user has not chosen that.
    """
    if first != system() and own_user_only():
        raise DistNetworkError(
            f"this rank and rank 0 run on different machines and have no job secret; {WAY_OUT}"
        )


def random_key() -> str:
    """Returns what rank 0 publishes: a new key where there is no secret, else nothing."""
    return secrets.token_hex(_KEY_BYTES) if derived_key("mesh") is None else ""


def group_key(attempt: str, published: str) -> bytes:
    """Returns the key of a group, which no other one has, whatever lies in the store.

    Args:
        attempt: what tells this group, and this attempt to form it, from all others: its scope and name.
        published: of :func:`random_key`, on rank 0.
    """
    purpose = f"mesh {attempt}"
    text = purpose.encode(errors="surrogateescape")
    return derived_key(purpose) or hmac.digest(bytes.fromhex(published), text, hashlib.sha256)
