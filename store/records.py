"""Records that ranks publish in a store as JSON, checked before they are used.

Whoever reaches the store can write to it, and another program may use the same keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.errors import DistStoreError

__all__ = ["Checked", "demand", "fields", "read"]

Checked = dict[str, Any]
"""A record whose fields have been checked."""

_T = TypeVar("_T")


def read(value: bytes, key: str, check: Callable[[Any], _T]) -> _T:
    """Returns what a key holds, as ``check`` returns it.

    Args:
        value: what the store gave for the key.
        key: the key, for the error.
        check: takes the decoded JSON; calls :func:`demand` and :func:`fields`.

    Raises:
        DistStoreError: it is not as ranks publish it.
    """
    try:
        return check(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise DistStoreError(
            f"the store holds something unusable under {key!r}: {error}; no other program may use the same "
            "store and prefix, and all ranks must run the same version"
        ) from error


def fields(record: Any, **kinds: type) -> Checked:
    """Returns the fields of a record, each of its type."""
    demand(isinstance(record, dict), f"{record!r} instead of a record")
    for name, kind in kinds.items():
        demand(type(record.get(name)) is kind, f"{name} = {record.get(name)!r}")
    return {name: record[name] for name in kinds}


def demand(true: bool, found: str) -> None:
    """Refuses a record that has something else than ranks publish."""
    if not true:
        raise ValueError(f"it has {found}")
