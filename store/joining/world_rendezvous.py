"""How ranks join and leave a world: one life of the default group, or a group that torch makes.

One store may serve several worlds, one after another. The keys below need ``set``, ``get``, ``add``, ``wait``
and ``check`` of a store; where it can get and set several keys at once, what rank 0 asks does not grow with
the number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as _torch_distributed

from collectives.errors import DistStoreError
from collectives.secret import WAY_OUT
from collectives.store.joining.announcements import Announcements, next_key
from collectives.store.joining.standby import Standby, offer, succession
from collectives.store.own_user import own_user_only
from collectives.store.prefix import PrefixStore
from collectives.store.process import system
from collectives.store.records import Checked, demand, fetch, fields, publish, publish_all
from collectives.store.waiting import delete_keys, missing_text, wait_for_keys

__all__ = ["KEYS", "forget_joining", "join_world", "leave_world", "wait_for_leavers"]

KEYS = "collectives"
"""Prefix of all our keys in a store that may have other users."""

_PROTOCOL = 6
"""Number of the key layout; ranks that differ in it refuse each other."""

_READ_LIMIT = timedelta(seconds=3)
"""How long rank 0, which may serve the store, stays for ranks that it has refused to read why."""

_ATTEMPT_CHECK = timedelta(milliseconds=100)
"""How long rank 0 waits for all before it looks for newer attempts."""

_OTHERS_LIMIT = timedelta(seconds=5)
"""How long rank 0 waits, after two ranks disagreed, for others to come and get the reason."""

_ANSWER_GRACE = timedelta(seconds=5)
"""How much longer than rank 0 the others wait, so that they hear which ranks are missing."""

_ATTEMPTS, _INFOS = "join/attempt", "join/info"
"""Names of what is announced: who attempts to join, and what an attempt that was called brings."""

_SERVED = "join/served"
"""Key of the numbers up to which rank 0 has read both, and of the attempts that it has left unanswered."""

_SUCCESSION = "succession"
"""Key of who serves the store of a world, and who would, in the world's part of it."""

_NONCE_BYTES = 16
_DIGITS = re.compile("[0-9a-f]{32}")

_MOST_ATTEMPTS = 1000
"""How many attempts rank 0 reads, and 16 more of each rank: processes may have come and died many times."""

_T = TypeVar("_T")


def join_world(
    store: Any,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    standby: Standby | None = None,
    what: str = "init_process_group",
) -> tuple[str, PrefixStore]:
    """Waits until all ranks of a world are here.

    Every other rank announces a join attempt, which thereby has a number. Rank 0 calls the newest attempt of
    each rank, compares what those that still live announce then, and answers. Calls and answers name the
    attempt, so that neither a former world, nor an attempt that failed, nor one of a process that died, can
    be taken for this one.

    An answer repeats random digits of its attempt, and brings those that rank 0 has made for the world. They
    begin the scope of the world's store, so that what ranks have written in another world proves nothing in
    this one.

    Args:
        store: any ``torch.distributed.Store``; the same on all ranks.
        rank: this rank.
        size: number of ranks.
        backend: name of the backend; must be equal on all ranks.
        timeout: time limit.
        standby: learns who serves the store, and who would.
        what: what the user has called, or what is to be made, for messages.

    Returns:
        The world's random digits, and its part of the store.

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
        "system": system() if size > 1 and own_user_only() else "",
        **({"serves": False, "standby": []} if standby is None else standby.offer()),
    }
    if rank == 0:
        return _Coordinator(store, size, about, timeout, what).join(standby)
    own = [next_key(store, _ATTEMPTS)]
    attempt = int(own[0].rpartition("/")[2])
    nonce = secrets.token_hex(_NONCE_BYTES)
    publish(store, own[0], {"rank": rank, "nonce": nonce})
    where = f"[rank {rank}] {what}:"
    called = _await_answer(store, f"join/call/{attempt}", where, rank, timeout, _call)
    own.append(f"join/call/{attempt}")
    if called is not None:
        delete_keys(store, own)
        raise ValueError(f"{where} {called['reason']}")
    try:
        own.append(next_key(store, _INFOS))
        publish(store, own[-1], {"attempt": attempt, **about})
        answer = _await_answer(
            store, f"join/result/{attempt}", where, rank, timeout, partial(_result, nonce=nonce)
        )
    except _torch_distributed.DistNetworkError as error:
        # Not a former world's store, with which another attempt may find the next one.
        raise DistStoreError(
            f"{where} rank 0 has called it, and ended its store: {error}",
            0,
        ) from error
    delete_keys(store, [*own, f"join/result/{attempt}"])
    if "world" in answer:
        world = _store_of(store, answer["world"])
        if standby is not None:
            known: Checked = {"server": -1, "addresses": []}
            if answer["served"]:
                known = fetch(world, _SUCCESSION, partial(succession, size=size))
            standby.learn(world.scope, **known)
        return answer["world"], world
    store.set(f"join/read/{attempt}", "")
    raise _error(f"{where} {answer['reason']}", answer["missing"])


def _error(text: str, missing: list[int]) -> Exception:
    return DistStoreError(text, missing[0], missing_ranks=missing) if missing else ValueError(text)


def forget_joining(store: Any, size: int) -> None:
    """Deletes the keys of a store in which no other world will join; called by all ranks that have joined."""
    if int(store.add("join/left", 1)) == size:
        delete_keys(store, ["join/left", "join/attempts/0", _ATTEMPTS, _INFOS, _SERVED])


def _store_of(store: Any, world: str) -> PrefixStore:
    """Returns the part of a store that is a world's, by its random digits."""
    return PrefixStore(world, store, scope=f"{getattr(store, 'scope', '')}world {world}")


def _attempt(record: Any) -> tuple[int, str]:
    """Checks an attempt; returns its rank, which may be none of this world, and its random digits."""
    found = fields(record, rank=int, nonce=str)
    demand(found["rank"] > 0, f"an attempt of rank {found['rank']}")
    return found["rank"], found["nonce"]


def _served(record: Any) -> Checked:
    """Checks up to which numbers rank 0 has read, its last world, and the attempts left to the next one."""
    found = fields(record, attempts=int, infos=int, left=list, world=str)
    demand(found["attempts"] >= 0 and found["infos"] >= 0, f"{found}")
    demand(all(type(one) is int and 0 < one <= found["attempts"] for one in found["left"]), f"{found}")
    return found


def _call(record: Any) -> Checked | None:
    """Checks rank 0's call: ``None``, or why it refuses an attempt."""
    return None if record is None else fields(record, reason=str)


def _info(record: Any) -> Checked:
    """Checks what an attempt brings."""
    about = fields(record, attempt=int, protocol=int, world_size=int, backend=str, process=str, system=str)
    return about | (offer(record) if about["protocol"] == _PROTOCOL else {})


def _result(record: Any, nonce: str) -> Checked:
    """Checks the outcome for an attempt: the world's digits, or why there is none."""
    demand(fields(record, nonce=str)["nonce"] == nonce, "an answer to another process")
    if "world" in record:
        demand(_DIGITS.fullmatch(str(record["world"])) is not None, f"the world {record['world']!r}")
        return fields(record, world=str, served=bool)
    found = fields(record, reason=str, missing=list)
    demand(all(type(rank) is int for rank in found["missing"]), "missing ranks that are no numbers")
    return found


def _await_answer(
    store: Any, key: str, where: str, rank: int, timeout: timedelta, check: Callable[[Any], _T]
) -> _T:
    """Returns what rank 0 publishes under a key, checked."""
    if not wait_for_keys(store, [key], timeout + _ANSWER_GRACE):
        raise DistStoreError(
            f"{where} rank 0 did not answer within {timeout.total_seconds():g} s; "
            f"either it did not come, or it has taken another process as rank {rank}: look at rank 0, and "
            "start every rank once",
            0,
        )
    return fetch(store, key, check)


class _Coordinator:
    """Rank 0's part of :func:`join_world`.

    Args:
        store: the store.
        size: number of ranks.
        about: what rank 0 brings.
        timeout: time limit.
        what: as of :func:`join_world`.
    """

    def __init__(self, store: Any, size: int, about: dict[str, Any], timeout: timedelta, what: str) -> None:
        self._store = store
        self._size = size
        self._about = about
        self._what = what
        self._attempt = int(store.add("join/attempts/0", 1))
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        served: Checked = {"attempts": 0, "infos": 0, "left": [], "world": ""}
        if store.check([_SERVED]):
            served = fetch(store, _SERVED, _served)
        most = _MOST_ATTEMPTS + 16 * size
        self._attempts = Announcements(store, _ATTEMPTS, most, served["attempts"])
        self._attempts.late = served["left"]
        self._infos = Announcements(store, _INFOS, most, served["infos"])
        self._former = served["world"]
        self._left: list[int] = []
        self._nonces: dict[int, str] = {}
        self._called: dict[int, int] = {}
        self._brought: dict[int, Checked] = {}
        self._joined: dict[int, Checked] = {}
        self._reason = ""

    def join(self, standby: Standby | None) -> tuple[str, PrefixStore]:
        """Returns the new world's digits and store, or raises on all ranks."""
        reason, missing = self._call_all(), []
        absent = [r for r in range(1, self._size) if r not in self._joined]
        if not reason and absent:
            reason, missing = missing_text(absent, self._timeout), absent
        if not reason and int(self._store.add("join/attempts/0", 0)) != self._attempt:
            reason = f"another process has come as rank 0, beside {self._about['process']}"
        if not reason and self._former:  # nobody reads the keys of the world before
            old = [_SUCCESSION, *(f"leave/{r}" for r in range(self._size))]
            delete_keys(_store_of(self._store, self._former), old)
        digits = secrets.token_hex(_NONCE_BYTES)
        world = _store_of(self._store, digits)
        offers = [self._about, *(self._joined[r] for r in sorted(self._joined))]
        server = next((r for r, one in enumerate(offers) if one["serves"]), -1) if not reason else -1
        known: Checked = {"server": server, "addresses": []}
        if server >= 0:
            known["addresses"] = [one["standby"] for one in offers]
            publish(world, _SUCCESSION, known)
        answer = {"world": digits, "served": server >= 0}
        if not reason:
            self._former = digits
        self._answer({"reason": reason, "missing": missing} if reason else answer, complete=not absent)
        if reason:
            read = [f"join/read/{self._called[r]}" for r in self._joined]
            wait_for_keys(self._store, read, _READ_LIMIT)
            raise _error(f"[rank 0] {self._what}: {reason}", missing)
        if standby is not None:
            standby.learn(world.scope, **known)
        return digits, world

    def _call_all(self) -> str:
        """Calls the newest attempt of every rank until all have come; returns disagreements."""
        deadline = self._deadline
        while len(self._joined) < self._size - 1 and time.monotonic() < deadline:
            wait_for_keys(self._store, self._expected(), min(_left(deadline), _ATTEMPT_CHECK))
            self._brought |= {info["attempt"]: info for info in self._infos.new(_info).values()}
            self._join_called()  # before newer processes come as the same ranks
            self._call_new()
            self._join_called()  # whom a former process of rank 0 has called already
            if self._reason:
                deadline = min(deadline, time.monotonic() + _OTHERS_LIMIT.total_seconds())
        return self._reason

    def _join_called(self) -> None:
        """Takes what those bring that were called, and notes the first disagreement."""
        for rank, attempt in self._called.items():
            if attempt in self._brought:
                self._joined[rank] = self._brought.pop(attempt)
                self._reason = self._reason or _disagreement(self._about, rank, self._joined[rank])

    def _expected(self) -> list[str]:
        """Returns keys that are there once all have come; earlier where other processes have come, too."""
        called = len(self._called) - len(self._joined)
        uncalled = self._size - 1 - len(self._called)
        keys = [self._attempts.key(number) for number in self._attempts.late]
        keys += [self._infos.key(number) for number in self._infos.late]
        if uncalled > len(self._attempts.late):
            keys.append(self._attempts.key(self._attempts.counted + uncalled - len(self._attempts.late)))
        if called > len(self._infos.late):
            keys.append(self._infos.key(self._infos.counted + called - len(self._infos.late)))
        return keys

    def _call_new(self) -> None:
        """Calls attempts, the newest of each rank, and refuses those of ranks that have joined."""
        calls: dict[str, Any] = {}
        for attempt, (rank, nonce) in self._attempts.new(_attempt).items():
            self._nonces[attempt] = nonce
            if rank >= self._size:
                self._left.append(attempt)
            elif rank in self._joined:
                taken = f"rank {rank} is taken by process {self._joined[rank]['process']}"
                calls[f"join/call/{attempt}"] = {"reason": f"{taken}; start every rank once"}
            else:
                former, newest = sorted([attempt, self._called.get(rank, attempt)])
                self._called[rank] = newest
                calls[f"join/call/{newest}"] = None
                if former != newest:  # which may have read its call already
                    reason = f"a newer process has come as rank {rank}"
                    calls[f"join/call/{former}"] = {"reason": reason}
                    calls |= self._result(former, {"reason": reason, "missing": []})
        publish_all(self._store, calls)

    def _result(self, attempt: int, answer: dict[str, Any]) -> dict[str, Any]:
        return {f"join/result/{attempt}": {**answer, "nonce": self._nonces[attempt]}}

    def _answer(self, answer: dict[str, Any], *, complete: bool) -> None:
        """Answers all that were called, and refuses processes that came as the same ranks meanwhile.

        Args:
            answer: for all.
            complete: whether all ranks have come. Otherwise who comes now is left to the next world.
        """
        # Before the answer: one that has read it may try again at once.
        if complete:
            self._call_new()
            self._attempts.late.clear()
        reached = {"attempts": self._attempts.counted, "infos": self._infos.counted}
        left = self._left + self._attempts.late
        publish(self._store, _SERVED, {**reached, "left": left, "world": self._former})
        answers: dict[str, Any] = {}
        for attempt in self._called.values():
            answers |= self._result(attempt, answer)
        publish_all(self._store, answers)


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
