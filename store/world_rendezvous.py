"""How ranks meet through a store: to start a world, and to start a group in it.

Words used here. A *world* is one life of the default group, from ``init_process_group`` to
``destroy_process_group``; one store may serve several worlds, one after another. A *knock* is one try of one
rank to join a world; knocks of a rank are numbered over the life of the store. A *turn* is one call that
makes a group; turns are counted alike on all ranks, because all ranks make groups in the same order.

The keys below need ``set``, ``get``, ``add``, ``wait`` and ``check`` of a store, and ``compare_set`` where it
has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as _torch_distributed

from collectives.errors import CollectiveMismatchError, DistStoreError, PeerLostError

__all__ = ["KEYS", "join_group", "join_world", "leave_world", "wait_for_keys", "wait_for_leavers"]

KEYS = "collectives"
"""Prefix of all our keys in a store that may have other users."""

_PROTOCOL = 1
"""Number of the key layout; ranks that differ in it refuse each other."""

_HERE = "here"

_HEARING_LIMIT = timedelta(seconds=3)
"""How long rank 0, which may serve the store, stays for ranks that it has refused to read why."""

_ROUND = timedelta(milliseconds=100)
"""How long rank 0 waits for all before it looks for newer knocks."""

_LATECOMERS_LIMIT = timedelta(seconds=5)
"""How long rank 0 waits, after two ranks disagreed, for others to come and be told."""

_LOOK = timedelta(milliseconds=200)
"""How often those who wait for the members of a group look whether one of them has died."""

_NEWS_LIMIT_S = 0.5
"""How long after the store has failed a rank may be found dead."""

_VERDICT_GRACE = timedelta(seconds=5)
"""How much longer than rank 0 the others wait, so that they hear which ranks are missing."""


def join_world(store: Any, rank: int, size: int, backend: str, timeout: timedelta) -> int:
    """Waits until all ranks of a world are here; returns the world's number, never used before on this store.

    Every other rank knocks. Rank 0 calls the newest knock of each, hears from those who still live what they
    bring, compares that, and answers. Calls and answers belong to one knock, so that neither a former world
    nor a try that failed, nor one of a process that died, can be taken for this one.

    Args:
        store: any ``torch.distributed.Store``; the same on all ranks.
        rank: this rank.
        size: number of ranks.
        backend: name of the backend; must be equal on all ranks.
        timeout: time limit.

    Raises:
        DistStoreError: a rank did not come in time; names all that are missing.
        ValueError: ranks disagree about the number of ranks or the backend, or two processes claim one rank.
    """
    about = {
        "protocol": _PROTOCOL,
        "world_size": size,
        "backend": backend,
        "process": f"{socket.gethostname()}:{os.getpid()}",
    }
    knock = int(store.add(f"join/knocks/{rank}", 1))
    if rank == 0:
        return _Reception(store, size, about, knock, timeout).receive()
    own = f"{rank}/{knock}"
    store.set(f"join/knock/{own}", "")
    called = _hear(store, f"join/call/{own}", rank, timeout)
    if called is not None:
        raise ValueError(f"[rank {rank}] init_process_group: {called['reason']}")
    store.set(f"join/here/{own}", json.dumps(about))
    answer = _hear(store, f"join/answer/{own}", rank, timeout)
    if "world" in answer:
        return int(answer["world"])
    store.set(f"join/heard/{own}", "")
    kind = DistStoreError if answer["missing"] else ValueError
    raise kind(f"[rank {rank}] init_process_group: {answer['reason']}")


def _hear(store: Any, key: str, rank: int, timeout: timedelta) -> Any:
    """Returns what rank 0 says under a key."""
    if not wait_for_keys(store, [key], timeout + _VERDICT_GRACE):
        raise DistStoreError(
            f"[rank {rank}] init_process_group: rank 0 did not answer within {timeout.total_seconds():g} s; "
            f"either it did not come, or it has taken another process as rank {rank}: look at rank 0, and "
            "start every rank once"
        )
    return json.loads(store.get(key))


class _Reception:
    """Rank 0's part of :func:`join_world`.

    Args:
        store: the store.
        size: number of ranks.
        about: what rank 0 brings.
        knock: rank 0's own knock.
        timeout: time limit.
    """

    def __init__(self, store: Any, size: int, about: dict[str, Any], knock: int, timeout: timedelta) -> None:
        self._store = store
        self._size = size
        self._about = about
        self._knock = knock
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._served = {r: int(store.add(f"join/served/{r}", 0)) for r in range(1, size)}
        self._called = dict(self._served)
        self._here: dict[int, dict[str, Any]] = {}

    def receive(self) -> int:
        """Returns the new world's number, or raises on all ranks."""
        reason, missing = self._call_all(), False
        absent = [r for r in range(1, self._size) if r not in self._here]
        if not reason and absent:
            reason, missing = _absent(absent, self._timeout), True
        if not reason and int(self._store.add("join/knocks/0", 0)) != self._knock:
            reason = f"another process has come as rank 0, beside {self._about['process']}"
        world = int(self._store.add("join/worlds", 1))
        self._answer({"reason": reason, "missing": missing} if reason else {"world": world})
        if reason:
            heard = [f"join/heard/{r}/{self._called[r]}" for r in self._here]
            wait_for_keys(self._store, heard, _HEARING_LIMIT)
            kind = DistStoreError if missing else ValueError
            raise kind(f"[rank 0] init_process_group: {reason}")
        return world

    def _call_all(self) -> str:
        """Calls the newest knock of every rank until all are here; returns how ranks disagree, if they do."""
        reason = ""
        deadline = self._deadline
        while len(self._here) < self._size - 1 and time.monotonic() < deadline:
            expected = {r: self._call(r) for r in range(1, self._size) if r not in self._here}
            wait_for_keys(self._store, list(expected.values()), min(_left(deadline), _ROUND))
            for r, key in expected.items():
                if not key.startswith("join/here/") or not self._store.check([key]):
                    continue
                self._here[r] = json.loads(self._store.get(key))
                reason = reason or _disagreement(self._about, r, self._here[r])
            if reason:
                deadline = min(deadline, time.monotonic() + _LATECOMERS_LIMIT.total_seconds())
        return reason

    def _call(self, rank: int) -> str:
        """Calls a rank that knocked since its last call; returns the key that is expected of it next."""
        newest = int(self._store.add(f"join/knocks/{rank}", 0))
        for knock in range(self._called[rank] + 1, newest):
            self._refuse(rank, knock, f"a newer process has come as rank {rank}")
        if newest > self._called[rank]:
            self._called[rank] = newest
            self._store.set(f"join/call/{rank}/{newest}", "null")
        if self._called[rank] == self._served[rank]:
            return f"join/knock/{rank}/{newest + 1}"
        return f"join/here/{rank}/{self._called[rank]}"

    def _refuse(self, rank: int, knock: int, reason: str) -> None:
        self._store.set(f"join/call/{rank}/{knock}", json.dumps({"reason": reason}))

    def _answer(self, answer: dict[str, Any]) -> None:
        """Answers every rank, and refuses processes that came as the same rank meanwhile."""
        for r, called in self._called.items():
            self._store.set(f"join/answer/{r}/{called}", json.dumps(answer))
            served = int(self._store.add(f"join/knocks/{r}", 0)) if r in self._here else called
            for knock in range(called + 1, served + 1):
                taken = f"rank {r} is taken by process {self._here[r]['process']}"
                self._refuse(r, knock, f"{taken}; start every rank once")
            self._store.add(f"join/served/{r}", served - self._served[r])


def _disagreement(mine: dict[str, Any], rank: int, theirs: dict[str, Any]) -> str:
    for key in ("protocol", "world_size", "backend"):
        if mine[key] != theirs.get(key):
            return f"the ranks differ in {key}: rank 0 has {mine[key]!r}, rank {rank} has {theirs.get(key)!r}"
    return ""


def leave_world(store: Any, rank: int) -> None:
    """Tells rank 0 that this rank no longer reads the world's store; silent where that is gone."""
    with contextlib.suppress(Exception):
        store.set(f"leave/{rank}", "left")


def wait_for_leavers(store: Any, size: int, limit: timedelta) -> None:
    """Waits on rank 0, which serves the store, until the others have left; at most ``limit``."""
    with contextlib.suppress(Exception):
        store.wait([f"leave/{r}" for r in range(1, size)], limit)


def join_group(
    store: Any,
    key: str,
    rank: int,
    members: Sequence[int],
    request: str,
    timeout: timedelta,
    lost_ranks: Callable[[], Sequence[int]] = tuple,
) -> None:
    """Checks that all ranks mean the same by this turn; members wait until all members are here.

    The first rank at a turn leaves its request. A rank that comes with another one raises, and leaves word of
    it, so that the members that wait for it raise as well; all members come to the same verdict.

    Args:
        store: the world's store.
        key: the turn.
        rank: this rank in the default group.
        members: ranks of the group's members in the default group.
        request: what this rank asks for; must be equal on all ranks that take part.
        timeout: time limit.
        lost_ranks: which ranks are known to have died; asked again and again while members are missing.

    Raises:
        CollectiveMismatchError: another rank asks for a different group at this turn.
        DistStoreError: a member did not come in time; names all that are missing.
        PeerLostError: a member has died.
    """
    try:
        conflict = _conflict(store, f"{key}/first", rank, request)
        store.set(f"{key}/here/{rank}", conflict or _HERE)
        if not conflict and rank in members:
            conflict = _wait_for_members(store, key, rank, members, timeout, lost_ranks)
    except _torch_distributed.DistNetworkError:
        # It may have gone with the member that kept it, whose end shows a little later.
        end = time.monotonic() + _NEWS_LIMIT_S
        while time.monotonic() < end:
            _refuse_lost(rank, members, lost_ranks)
            time.sleep(_NEWS_LIMIT_S / 20)
        raise
    if conflict:
        raise CollectiveMismatchError(
            f"[rank {rank}] new_group: {conflict}; all ranks must create the same groups in the same order"
        )


def _conflict(store: Any, key: str, rank: int, request: str) -> str:
    """Returns how this rank's request differs from that of the first rank at this turn, if it does."""
    mine = json.dumps([rank, request])
    try:
        first = store.compare_set(key, "", mine)
    except (NotImplementedError, AttributeError):
        # A user's store may lack compare_set. Then ranks that ask for different groups run into the time
        # limit instead.
        return ""
    other, asked = json.loads(first)
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


def _wait_for_members(
    store: Any,
    key: str,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    lost_ranks: Callable[[], Sequence[int]],
) -> str:
    """Returns the conflict that one of the members came with; empty where all agree."""
    keys = [f"{key}/here/{member}" for member in members]
    end = time.monotonic() + timeout.total_seconds()
    left = timeout
    while not (all_here := wait_for_keys(store, keys, min(_LOOK, left))):
        _refuse_lost(rank, members, lost_ranks)
        left = timedelta(seconds=end - time.monotonic())
        if left <= timedelta(0):
            break
    _refuse_lost(rank, members, lost_ranks)  # one may have died since it came
    if not all_here:
        absent = [member for member, k in zip(members, keys, strict=True) if not store.check([k])]
        raise DistStoreError(f"[rank {rank}] new_group: {_absent(absent or members, timeout)}")
    values = store.multi_get(keys) if store.has_extended_api() else [store.get(k) for k in keys]
    return next((value.decode() for value in values if value.decode() != _HERE), "")


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


def _absent(ranks: Sequence[int], timeout: timedelta) -> str:
    names = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return (
        f"{names} did not come within {timeout.total_seconds():g} s; start every rank, or raise the "
        "timeout for ranks that come late"
    )


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
