"""Waiting for the keys of other ranks in any store, and what to say of those that did not come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as _torch_distributed

from collectives.store.base import Store

_SHORT = timedelta(seconds=1)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.03


def wait_for_keys(store: Any, keys: list[str], limit: timedelta) -> bool:
    """Returns whether all keys came within the limit.

    The stores of torch do not agree on the class of a time limit's error; a broken connection has its own
    class in all of them. They log each wait whose limit passes, with a stack of C++, so that they are asked
    again and again where a short one is likely to.
    """
    if limit <= _SHORT and not isinstance(root_of(store), Store):
        end = time.monotonic() + limit.total_seconds()
        pause = _FIRST_PAUSE_S
        while not store.check(keys):
            if (left := end - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True
    try:
        store.wait(keys, limit)
    except _torch_distributed.DistNetworkError:
        raise
    except RuntimeError:
        return bool(store.check(keys))
    return True


def compare_set(store: Any, key: str, expected: str, desired: Any) -> Any:
    """Returns what the store's method does; ``None`` where a user's store lacks it."""
    try:
        return store.compare_set(key, expected, desired)
    except (NotImplementedError, AttributeError):
        return None


_ABSENT = "-"
"""What :func:`peek` compares with; no record is written so."""


def peek(store: Any, key: str, *, by_get: bool = False) -> bytes | None:
    """Returns what a key was set to, ``None`` where it is not there; never waits.

    Args:
        store: the store.
        key: the key.
        by_get: in a user's store without ``compare_set``, where all keys seem absent, reads it by ``get``,
            which waits where the key is deleted meanwhile.
    """
    value = compare_set(store, key, _ABSENT, _ABSENT)
    if value is None:
        return bytes(store.get(key)) if by_get and store.check([key]) else None
    return None if bytes(value) == _ABSENT.encode() else bytes(value)


def missing_text(ranks: Sequence[int], timeout: timedelta) -> str:
    """Returns which ranks did not come in time, and the way out."""
    names = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return (
        f"{names} did not come within {timeout.total_seconds():g} s; start every rank, or raise the "
        "timeout for ranks that come late"
    )


def delete_keys(store: Any, keys: Iterable[str]) -> None:
    """Deletes keys that nobody reads any more, where the store is there and can delete."""
    with contextlib.suppress(Exception):
        for key in keys:
            store.delete_key(key)


def root_of(store: Any) -> Any:
    """Returns the store below all layers of prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
