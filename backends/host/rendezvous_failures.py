"""Failures while a host group is formed, and how all ranks get to know them."""

from __future__ import annotations

import time
from typing import Any

from collectives.errors import DistError, PeerLostError

__all__ = ["READERS_S", "AskedStore", "StoreLostError", "await_readers"]

READERS_S = 2.0
"""How long a rank that fails stays for the others to read why."""
_LOOK_AGAIN_S = 0.002


class StoreLostError(Exception):
    """The store cannot be asked any more; its own error is the cause."""


class AskedStore:
    """Calls the methods of a store, all of whose errors are :class:`StoreLostError`.

    Args:
        store: the store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.scope = getattr(store, "scope", "")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def ask(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except Exception as error:
                raise StoreLostError(str(error)) from error

        return ask


def await_readers(store: AskedStore, key: str, size: int, failed: DistError) -> None:
    """Waits a moment until all who can have read why the group fails: the store may go with this rank.

    Args:
        store: the group's store.
        key: counts the ranks that have read it.
        size: number of ranks.
        failed: why; those that are lost or missing read nothing.
    """
    gone = {*failed.missing_ranks, *([failed.rank] if isinstance(failed, PeerLostError) else [])}
    end = time.monotonic() + READERS_S
    readers = store.add(key, 1)
    while readers < size - len(gone) and time.monotonic() < end:
        time.sleep(_LOOK_AGAIN_S)
        readers = store.add(key, 0)
