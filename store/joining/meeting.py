"""Ranks wait for each other in a store, and all come to one outcome: they met, or the same error."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as _torch_distributed

from collectives.errors import DistError, DistNetworkError
from collectives.store.error_records import error_of, record_of
from collectives.store.records import demand, fetch, fetch_all, publish, written
from collectives.store.waiting import delete_keys, wait_for_keys

__all__ = ["decide", "meet"]

_LOOK_AGAIN = timedelta(milliseconds=200)
"""How often those who wait ask whether one of the others has died."""

_LOSS_LIMIT_S = 0.5
"""How long after the store has failed a rank may be found dead."""


def meet(
    store: Any,
    key: str,
    rank: int,
    ranks: Sequence[int],
    limit: timedelta,
    lost_ranks: Callable[[], Collection[int]],
    why: Callable[[Sequence[int], bool], DistError],
) -> DistError | None:
    """Waits until all ranks have called this; returns ``None`` then, and else the error that all of them get.

    Whoever sees the last rank come, a rank dead, or its own limit passed, writes the outcome; the first word
    counts, for ranks that come later too. All wait for that one key, so that what each asks does not grow
    with their number. The last one looks for the records of all, since anybody may count on, and the last
    one to leave deletes the keys.

    Args:
        store: the ranks' store.
        key: prefix of the keys, new for each meeting.
        rank: this rank.
        ranks: all that meet.
        limit: time limit of this rank.
        lost_ranks: which ranks are known to have died; asked again and again.
        why: returns the error for ranks that have died (``True``), or not come within the limit (``False``).

    Raises:
        DistNetworkError: the store failed, and no rank is seen to have died with it.
        DistStoreError: somebody else writes to the store.
    """
    outcome = f"{key}/outcome"
    end = time.monotonic() + limit.total_seconds()
    try:
        publish(store, f"{key}/here/{rank}", rank)
        if int(store.add(f"{key}/arrived", 1)) >= len(ranks) and not _absent(store, key, ranks):
            decide(store, outcome, None)
        while not wait_for_keys(store, [outcome], _until(end)):
            if lost := sorted({*lost_ranks()}.intersection(ranks)):
                decide(store, outcome, record_of(why(lost, True)))
            elif time.monotonic() >= end:
                absent = _absent(store, key, ranks)
                decide(store, outcome, record_of(why(absent, False)) if absent else None)
        found = fetch(store, outcome, _outcome)
        if int(store.add(f"{key}/left", 1)) == len(ranks):
            here = [f"{key}/here/{one}" for one in ranks]
            delete_keys(store, [*here, outcome, f"{key}/arrived", f"{key}/left"])
        return found
    except _torch_distributed.DistNetworkError as error:
        # It may have gone with the rank that kept it, whose end shows a little later.
        end = time.monotonic() + _LOSS_LIMIT_S
        while time.monotonic() < end:
            if lost := sorted({*lost_ranks()}.intersection(ranks)):
                return why(lost, True)
            time.sleep(_LOSS_LIMIT_S / 20)
        text = f"the store failed; whoever kept it may have died: {error}"
        raise DistNetworkError(text) from error


def decide(store: Any, key: str, outcome: Any) -> None:
    """Publishes what ranks come to, unless one has done so: all go by the first word."""
    value = written(store, key, outcome)
    try:
        store.compare_set(key, "", value)
    except (NotImplementedError, AttributeError):  # a user's store may lack it
        store.set(key, value)


def _absent(store: Any, key: str, ranks: Sequence[int]) -> list[int]:
    """Returns the ranks of which there is no record that they have come."""
    keys = {one: f"{key}/here/{one}" for one in ranks}
    here = [*ranks] if store.check([*keys.values()]) else [one for one in ranks if store.check([keys[one]])]
    came = fetch_all(store, [keys[one] for one in here], _rank)
    return [one for one in ranks if one not in came]


def _rank(record: Any) -> int:
    demand(type(record) is int, f"{record!r} instead of a rank")
    return int(record)


def _outcome(record: Any) -> DistError | None:
    return None if record is None else error_of(record)


def _until(end: float) -> timedelta:
    return min(_LOOK_AGAIN, timedelta(seconds=max(end - time.monotonic(), 0.001)))
