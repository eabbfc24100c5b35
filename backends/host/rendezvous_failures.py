"""Failures while a host group is formed, and how all ranks get to know them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from collectives.errors import DistError, PeerLostError

__all__ = ["READERS_S", "StoreLostError", "await_readers"]

READERS_S = 2.0
"""How long a rank that fails stays for the others to read why."""
_LOOK_AGAIN_S = 0.002


class StoreLostError(Exception):
    """The store cannot be asked any more; its own error is the cause."""


def await_readers(ask: Callable[..., Any], key: str, size: int, failed: DistError) -> None:
    """Waits a moment until all who can have read why the group fails: the store may go with this rank.

    Args:
        ask: calls the store.
        key: counts the ranks that have read it.
        size: number of ranks.
        failed: why; those that are lost or missing read nothing.
    """
    gone = {*failed.missing_ranks, *([failed.rank] if isinstance(failed, PeerLostError) else [])}
    end = time.monotonic() + READERS_S
    readers = ask("add", key, 1)
    while readers < size - len(gone) and time.monotonic() < end:
        time.sleep(_LOOK_AGAIN_S)
        readers = ask("add", key, 0)
