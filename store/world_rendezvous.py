"""How ranks join and leave a world, which is one life of the default group.

One store may serve several worlds, one after another. The keys below need ``set``, ``get``, ``add``, ``wait``
and ``check`` of a store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as _torch_distributed

from collectives.errors import DistStoreError
from collectives.secret import WAY_OUT, derived_key, is_insecure
from collectives.store.process import system
from collectives.store.records import Checked, demand, fields, read, written
from collectives.store.standby import Standby, offer, succession
from collectives.store.waiting import delete_keys, missing_text, wait_for_keys

__all__ = ["KEYS", "join_world", "leave_world", "wait_for_leavers"]

KEYS = "collectives"
"""Prefix of all our keys in a store that may have other users."""

_PROTOCOL = 4
"""Number of the key layout; ranks that differ in it refuse each other."""

_READ_LIMIT = timedelta(seconds=3)
"""How long rank 0, which may serve the store, stays for ranks that it has refused to read why."""

_ATTEMPT_CHECK = timedelta(milliseconds=100)
"""How long rank 0 waits for all before it looks for newer attempts."""

_OTHERS_LIMIT = timedelta(seconds=5)
"""How long rank 0 waits, after two ranks disagreed, for others to come and get the reason."""

_ANSWER_GRACE = timedelta(seconds=5)
"""How much longer than rank 0 the others wait, so that they hear which ranks are missing."""

_T = TypeVar("_T")


def join_world(
    store: Any, rank: int, size: int, backend: str, timeout: timedelta, standby: Standby | None = None
) -> int:
    """Waits until all ranks of a world are here; returns the world's number, never used before on this store.

    Every other rank registers a join attempt. Rank 0 calls the newest attempt of each rank, compares what
    those that still live bring, and answers. Calls and answers name the attempt, so that neither a former
    world, nor an attempt that failed, nor one of a process that died, can be taken for this one.

    Args:
        store: any ``torch.distributed.Store``; the same on all ranks.
        rank: this rank.
        size: number of ranks.
        backend: name of the backend; must be equal on all ranks.
        timeout: time limit.
        standby: learns who serves the store, and who would.

    Raises:
        DistStoreError: a rank did not come in time; names all that are missing; or rank 0 has ended; or the
            store holds what no rank of this job has written.
        ValueError: ranks disagree about the number of ranks or the backend, two processes claim one rank, or
            ranks on different machines have no job secret.
    """
    about = {
        "protocol": _PROTOCOL,
        "world_size": size,
        "backend": backend,
        "process": f"{socket.gethostname()}:{os.getpid()}",
        # Only ranks with a secret in common may be on several systems.
        "system": "" if derived_key("records") or is_insecure() else system(),
        **({"serves": False, "standby": []} if standby is None else standby.offer()),
    }
    attempt = int(store.add(f"join/attempts/{rank}", 1))
    if rank == 0:
        return _Coordinator(store, size, about, attempt, timeout).join(standby)
    own = f"{rank}/{attempt}"
    store.set(f"join/attempt/{own}", "")
    called = _await_answer(store, f"join/call/{own}", rank, timeout, _call)
    if called is not None:
        raise ValueError(f"[rank {rank}] init_process_group: {called['reason']}")
    try:
        _publish(store, f"join/info/{own}", about)
        answer = _await_answer(store, f"join/result/{own}", rank, timeout, _result)
    except _torch_distributed.DistNetworkError as error:
        # Not a former world's store, with which another attempt may find the next one.
        raise DistStoreError(
            f"[rank {rank}] init_process_group: rank 0 has called it, and ended its store: {error}",
            0,
        ) from error
    delete_keys(store, [f"join/call/{own}", f"join/result/{own}"])
    if "world" in answer:
        world = int(answer["world"])
        if standby is not None:
            known = _succession(store, world, size) if answer["served"] else {"server": -1, "addresses": []}
            standby.learn(**known)
        return world
    store.set(f"join/read/{own}", "")
    raise _error(rank, answer["reason"], answer["missing"])


def _error(rank: int, reason: str, missing: list[int]) -> Exception:
    text = f"[rank {rank}] init_process_group: {reason}"
    return DistStoreError(text, missing[0], missing_ranks=missing) if missing else ValueError(text)


def _publish(store: Any, key: str, record: Any) -> None:
    store.set(key, written(record, key))


def _call(record: Any) -> Checked | None:
    """Checks rank 0's call: ``None``, or why it refuses an attempt."""
    return None if record is None else fields(record, reason=str)


def _info(record: Any) -> Checked:
    """Checks what a rank brings."""
    about = fields(record, protocol=int, world_size=int, backend=str, process=str, system=str)
    return about | (offer(record) if about["protocol"] == _PROTOCOL else {})


def _succession(store: Any, world: int, size: int) -> Checked:
    """Returns who serves the store of a world, and who would."""
    key = f"{world}/succession"
    return read(store.get(key), key, partial(succession, size=size))


def _result(record: Any) -> Checked:
    """Checks the outcome: the world's number, or why there is none."""
    if isinstance(record, dict) and "world" in record:
        return fields(record, world=int, served=bool)
    found = fields(record, reason=str, missing=list)
    demand(all(type(rank) is int for rank in found["missing"]), "missing ranks that are no numbers")
    return found


def _await_answer(store: Any, key: str, rank: int, timeout: timedelta, check: Callable[[Any], _T]) -> _T:
    """Returns what rank 0 publishes under a key, checked."""
    if not wait_for_keys(store, [key], timeout + _ANSWER_GRACE):
        raise DistStoreError(
            f"[rank {rank}] init_process_group: rank 0 did not answer within {timeout.total_seconds():g} s; "
            f"either it did not come, or it has taken another process as rank {rank}: look at rank 0, and "
            "start every rank once",
            0,
        )
    return read(store.get(key), key, check)


class _Coordinator:
    """Rank 0's part of :func:`join_world`.

    Args:
        store: the store.
        size: number of ranks.
        about: what rank 0 brings.
        attempt: number of rank 0's own attempt.
        timeout: time limit.
    """

    def __init__(
        self, store: Any, size: int, about: dict[str, Any], attempt: int, timeout: timedelta
    ) -> None:
        self._store = store
        self._size = size
        self._about = about
        self._attempt = attempt
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._served = {r: int(store.add(f"join/served/{r}", 0)) for r in range(1, size)}
        self._called = dict(self._served)
        self._joined: dict[int, dict[str, Any]] = {}

    def join(self, standby: Standby | None) -> int:
        """Returns the new world's number, or raises on all ranks."""
        reason, missing = self._call_all(), []
        absent = [r for r in range(1, self._size) if r not in self._joined]
        if not reason and absent:
            reason, missing = missing_text(absent, self._timeout), absent
        if not reason and int(self._store.add("join/attempts/0", 0)) != self._attempt:
            reason = f"another process has come as rank 0, beside {self._about['process']}"
        world = int(self._store.add("join/worlds", 1))
        if not reason:  # nobody reads the keys of the world before
            old = [f"{world - 1}/succession", *(f"{world - 1}/leave/{r}" for r in range(self._size))]
            delete_keys(self._store, old)
        offers = [self._about, *(self._joined[r] for r in sorted(self._joined))]
        server = next((r for r, one in enumerate(offers) if one["serves"]), -1) if not reason else -1
        known: Checked = {"server": server, "addresses": []}
        if server >= 0:
            known["addresses"] = [one["standby"] for one in offers]
            _publish(self._store, f"{world}/succession", known)
        answer = {"world": world, "served": server >= 0}
        self._answer({"reason": reason, "missing": missing} if reason else answer)
        if reason:
            read = [f"join/read/{r}/{self._called[r]}" for r in self._joined]
            wait_for_keys(self._store, read, _READ_LIMIT)
            raise _error(0, reason, missing)
        if standby is not None:
            standby.learn(**known)
        return world

    def _call_all(self) -> str:
        """Calls the newest attempt of every rank until all have come; returns disagreements."""
        reason = ""
        deadline = self._deadline
        while len(self._joined) < self._size - 1 and time.monotonic() < deadline:
            expected = {r: self._call(r) for r in range(1, self._size) if r not in self._joined}
            wait_for_keys(self._store, list(expected.values()), min(_left(deadline), _ATTEMPT_CHECK))
            for r, key in expected.items():
                if not key.startswith("join/info/") or not self._store.check([key]):
                    continue
                self._joined[r] = read(self._store.get(key), key, _info)
                reason = reason or _disagreement(self._about, r, self._joined[r])
            if reason:
                deadline = min(deadline, time.monotonic() + _OTHERS_LIMIT.total_seconds())
        return reason

    def _call(self, rank: int) -> str:
        """Calls a rank that made an attempt since its last call; returns the key that is expected next."""
        newest = int(self._store.add(f"join/attempts/{rank}", 0))
        for attempt in range(self._called[rank] + 1, newest):
            self._refuse(rank, attempt, f"a newer process has come as rank {rank}")
        if newest > self._called[rank]:
            self._called[rank] = newest
            _publish(self._store, f"join/call/{rank}/{newest}", None)
        if self._called[rank] == self._served[rank]:
            return f"join/attempt/{rank}/{newest + 1}"
        return f"join/info/{rank}/{self._called[rank]}"

    def _refuse(self, rank: int, attempt: int, reason: str) -> None:
        _publish(self._store, f"join/call/{rank}/{attempt}", {"reason": reason})

    def _answer(self, answer: dict[str, Any]) -> None:
        """Answers every rank, and refuses processes that came as the same rank meanwhile."""
        for r, called in self._called.items():
            # Counted before the answer: one that is refused may try again as soon as it has read it.
            served = int(self._store.add(f"join/attempts/{r}", 0)) if r in self._joined else called
            for attempt in range(called + 1, served + 1):
                taken = f"rank {r} is taken by process {self._joined[r]['process']}"
                self._refuse(r, attempt, f"{taken}; start every rank once")
            _publish(self._store, f"join/result/{r}/{called}", answer)
            self._store.add(f"join/served/{r}", served - self._served[r])
            delete_keys(self._store, [f"join/attempt/{r}/{called}", f"join/info/{r}/{called}"])


def _disagreement(mine: dict[str, Any], rank: int, theirs: dict[str, Any]) -> str:
    for key in ("protocol", "world_size", "backend"):
        if mine[key] != theirs.get(key):
            return f"the ranks differ in {key}: rank 0 has {mine[key]!r}, rank {rank} has {theirs.get(key)!r}"
    if mine["system"] != theirs["system"]:
        return f"rank 0 and rank {rank} run on different machines and have no job secret; {WAY_OUT}"
    return ""


def leave_world(store: Any, rank: int) -> None:
    """Tells rank 0 that this rank no longer reads the world's store; silent where that is gone."""
    with contextlib.suppress(Exception):
        store.set(f"leave/{rank}", "left")


def wait_for_leavers(store: Any, ranks: Iterable[int], limit: timedelta) -> None:
    """Waits on rank 0, which serves the store, until other ranks have left; at most ``limit``."""
    keys = [f"leave/{r}" for r in ranks]
    with contextlib.suppress(Exception):
        if keys:
            store.wait(keys, limit)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
