"""Failures while a host group is formed, as ranks tell each other through the store."""

from __future__ import annotations

from typing import Any

from collectives.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    PeerLostError,
)

__all__ = ["StoreLostError", "error_of", "record_of"]

_KINDS: dict[str, type[DistError]] = {
    kind.__name__: kind
    for kind in (
        PeerLostError,
        CollectiveTimeoutError,
        DistBackendError,
        DistNetworkError,
        DistStoreError,
        DistError,
    )
}
"""The errors by name, the special ones first."""


class StoreLostError(Exception):
    """The store cannot be asked any more; its own error is the cause."""


def record_of(error: DistError, text: str) -> dict[str, Any]:
    """Returns an error as it is published in the store."""
    kind = next(name for name, one in _KINDS.items() if isinstance(error, one))
    return {"kind": kind, "rank": error.rank if isinstance(error, PeerLostError) else -1, "text": text}


def error_of(kind: str, rank: int, text: str) -> DistError:
    """Returns the error that a rank has published."""
    if kind == PeerLostError.__name__:
        return PeerLostError(text, rank)
    return _KINDS.get(kind, DistError)(text)
