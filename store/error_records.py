"""Errors as ranks tell each other of them through a store: JSON with all that a program can read."""

from __future__ import annotations

from typing import Any

from collectives.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
)
from collectives.store.records import demand, fields

__all__ = ["error_of", "record_of"]

_KINDS: dict[str, type[DistError]] = {
    kind.__name__: kind
    for kind in (
        PeerLostError,
        CollectiveTimeoutError,
        CollectiveMismatchError,
        GroupAbortedError,
        DistBackendError,
        DistNetworkError,
        DistStoreError,
        DistError,
    )
}
"""The errors by name, the special ones first."""


def record_of(error: DistError) -> dict[str, Any]:
    """Returns an error as it is published."""
    kind = next(name for name, one in _KINDS.items() if isinstance(error, one))
    cause = None if error.cause is None else record_of(error.cause)
    return {"kind": kind, "text": str(error), "cause": cause, **error.details()}


def error_of(record: Any) -> DistError:
    """Returns the error that a rank has published.

    Args:
        record: what was published, without its JSON; checked here.

    Raises:
        ValueError: it is no such record.
    """
    found = fields(record, kind=str, text=str, rank=int, missing_ranks=list, operation=str, sequence=int)
    kind, text = found.pop("kind"), found.pop("text")
    demand(kind in _KINDS, f"an error of the class {kind!r}")
    # As numbers that the C++ core has room for.
    ranks = [found["rank"], *found["missing_ranks"]]
    demand(all(type(rank) is int and -1 <= rank < 2**31 for rank in ranks), f"the ranks {ranks}")
    demand(-1 <= found["sequence"] < 2**63, f"the sequence number {found['sequence']}")
    cause = record.get("cause")
    return _KINDS[kind](text, **found, cause=None if cause is None else error_of(cause))
