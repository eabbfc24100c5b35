"""How the ranks of a world agree to make a group, and its members wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as _torch_distributed

from collectives.errors import CollectiveMismatchError, DistStoreError, PeerLostError
from collectives.store.joining.meeting import decide
from collectives.store.records import as_text, demand, fetch, publish, read, written
from collectives.store.waiting import delete_keys, missing_text, wait_for_keys

__all__ = ["join_group"]

_LOST_CHECK = timedelta(milliseconds=200)
"""How often those who wait for the members of a group ask whether one of them has died."""

_LOSS_LIMIT_S = 0.5
"""How long after the store has failed a rank may be found dead."""


def join_group(
    store: Any,
    key: str,
    rank: int,
    members: Sequence[int],
    request: str,
    timeout: timedelta,
    lost_ranks: Callable[[], Sequence[int]] = tuple,
    callers: Sequence[int] = (),
) -> None:
    """Checks that all ranks ask for the same group; members wait until all members are here.

    The first rank publishes its request. A rank with a different one publishes the conflict and raises, so
    that the members that wait for it raise as well: either all members join, or all raise.

    Args:
        store: the world's store.
        key: prefix of the group's keys, equal on all ranks: they make groups in the same order.
        rank: this rank in the default group.
        members: ranks of the group's members in the default group.
        request: what this rank asks for; must be equal on all ranks that take part.
        timeout: time limit.
        lost_ranks: which ranks are known to have died; asked again and again while members are missing.
        callers: all ranks that call this, members or not, the last of which deletes the keys.

    Raises:
        CollectiveMismatchError: another rank asks for a different group.
        DistStoreError: a member did not come in time; names all that are missing.
        PeerLostError: a member has died.
    """
    part = str(members[0]) if members else ""  # of several groups that one call makes, one for each part
    try:
        conflict = _conflict(store, f"{key}/first", rank, request)
        if conflict:
            publish(store, f"{key}/conflict", conflict)
            if members:
                decide(store, f"{key}/outcome/{part}", conflict)
        elif rank in members:
            conflict = _join_members(store, key, part, rank, members, timeout, lost_ranks)
    except _torch_distributed.DistNetworkError:
        # It may have gone with the member that kept it, whose end shows a little later.
        end = time.monotonic() + _LOSS_LIMIT_S
        while time.monotonic() < end:
            _refuse_lost(rank, members, lost_ranks)
            time.sleep(_LOSS_LIMIT_S / 20)
        raise
    if conflict:
        raise CollectiveMismatchError(
            f"[rank {rank}] new_group: {conflict}; all ranks must create the same groups in the same order"
        )
    if callers:
        _leave(store, key, part, rank, members, len(callers))


def _leave(store: Any, key: str, part: str, rank: int, members: Sequence[int], callers: int) -> None:
    """Deletes what nobody reads any more: the last member what is theirs, the last of all the rest."""
    done = 1
    if rank in members:
        delete_keys(store, [f"{key}/here/{rank}"])
        if int(store.add(f"{key}/arrived/{part}", 1)) < 2 * len(members):
            return
        delete_keys(store, [f"{key}/arrived/{part}", f"{key}/outcome/{part}"])
        done = len(members)
    if int(store.add(f"{key}/done", done)) == callers:
        delete_keys(store, [f"{key}/first", f"{key}/done"])


def _request(record: Any) -> tuple[int, str]:
    """Checks a rank and what it asks for."""
    demand(isinstance(record, list) and [type(part) for part in record] == [int, str], f"{record!r}")
    return record[0], record[1]


def _conflict(store: Any, key: str, rank: int, request: str) -> str:
    """Returns how this rank's request differs from that of the first rank, if it does."""
    mine = written(store, key, [rank, request])
    try:
        first = store.compare_set(key, "", mine)
    except (NotImplementedError, AttributeError):
        # A user's store may lack compare_set. Then ranks that ask for different groups run into the time
        # limit instead.
        return ""
    other, asked = read(store, key, first, _request)
    if asked == request:
        return ""
    return f"rank {other} asks for {asked}, but rank {rank} for {request}"


def _refuse_lost(rank: int, members: Sequence[int], lost_ranks: Callable[[], Sequence[int]]) -> None:
    lost = next((member for member in lost_ranks() if member in members), None)
    if lost is not None:
        raise PeerLostError(
            f"[rank {rank}] new_group: rank {lost}, a member of the group, has died; make the group of the "
            "ranks that are left, or start all of them again",
            lost,
        )


def _join_members(
    store: Any,
    key: str,
    part: str,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    lost_ranks: Callable[[], Sequence[int]],
) -> str:
    """Waits for all members; returns the conflict that one of them came with, empty where all agree.

    Members wait for one key, which the last of them sets, so that what each asks the store does not grow with
    their number.
    """
    store.set(f"{key}/here/{rank}", "")  # tells which are missing, in the end
    outcome = f"{key}/outcome/{part}"
    if int(store.add(f"{key}/arrived/{part}", 1)) == len(members):
        decide(store, outcome, "")
    end = time.monotonic() + timeout.total_seconds()
    while not wait_for_keys(store, [outcome], min(_LOST_CHECK, _left(end))):
        _refuse_lost(rank, members, lost_ranks)
        if store.check([f"{key}/conflict"]):  # of a rank that takes itself for no member
            decide(store, outcome, fetch(store, f"{key}/conflict", as_text))
        elif time.monotonic() >= end:
            _refuse_missing(store, key, rank, members, timeout, outcome)
    _refuse_lost(rank, members, lost_ranks)  # one may have died since it came
    return fetch(store, outcome, as_text)


def _refuse_missing(
    store: Any, key: str, rank: int, members: Sequence[int], timeout: timedelta, outcome: str
) -> None:
    absent = [member for member in members if not store.check([f"{key}/here/{member}"])]
    if store.check([outcome]):  # they came at the last moment, and may have left again
        return
    text = f"[rank {rank}] new_group: {missing_text(absent or members, timeout)}"
    raise DistStoreError(text, absent[0] if absent else -1, missing_ranks=absent)


def _left(end: float) -> timedelta:
    return timedelta(seconds=max(end - time.monotonic(), 0.001))
