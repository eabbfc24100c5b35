"""Waiting for the keys of other ranks in any store, and what to say of those that did not come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as _torch_distributed

__all__ = ["delete_keys", "missing_text", "wait_for_keys"]


def wait_for_keys(store: Any, keys: list[str], limit: timedelta) -> bool:
    """Returns whether all keys came within the limit.

    The stores of torch do not agree on the class of a time limit's error; a broken connection has its own
    class in all of them.
    """
    try:
        store.wait(keys, limit)
    except _torch_distributed.DistNetworkError:
        raise
    except RuntimeError:
        return bool(store.check(keys))
    return True


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
