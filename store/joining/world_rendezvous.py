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
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as _torch_distributed
from torch._C._distributed_c10d import HashStore as TorchHashStore

from collectives.errors import DistNetworkError, DistStoreError
from collectives.logs import Log
from collectives.secret import WAY_OUT
from collectives.store.file import FileStore
from collectives.store.joining.standby import Standby, offer, succession
from collectives.store.memory import HashStore
from collectives.store.prefix import PrefixStore
from collectives.store.process import own_user_only, system
from collectives.store.records import (
    Announcements,
    Checked,
    demand,
    fetch,
    fields,
    next_key,
    publish,
    publish_all,
)
from collectives.store.tcp import TCPStore
from collectives.store.tcp.store import elsewhere, refusals
from collectives.store.waiting import delete_keys, missing_text, root_of, wait_for_keys

__all__ = ["KEYS", "forget_joining", "join_world", "leave_world", "wait_for_leavers"]

KEYS = "collectives"
"""Prefix of all our keys in a store that may have other users."""

_PROTOCOL = 7
"""Number of the key layout; ranks that differ in it refuse each other."""

_READ_LIMIT = timedelta(seconds=3)
"""How long rank 0, which may serve the store, stays for ranks that it has refused to read why."""

_ATTEMPT_CHECK = timedelta(milliseconds=100)
"""How long rank 0 waits for all before it looks for newer attempts."""

_OTHERS_LIMIT = timedelta(seconds=3)
"""How long rank 0 waits, after two ranks disagreed, for others to come and get the reason."""

_LOOK = (
    "it has taken another process as rank {}, of this job or of another one at the same address, or has "
    "another world_size: look at rank 0, and start every rank once"
)

_TELL_AFTER = timedelta(seconds=10)
"""How long a rank waits for rank 0 before it says so, once."""

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

log = Log()


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
    about_attempt = {"rank": rank, "nonce": nonce, "world_size": size, "process": about["process"]}
    publish(store, own[0], about_attempt)
    where = f"[rank {rank}] {what}:"
    ask = partial(_await_answer, store, attempt, where, rank, timeout)
    try:
        refusal = ask("call", _call)
    except _torch_distributed.DistNetworkError as error:
        raise DistNetworkError(
            f"{where} the store has failed before rank 0 has answered; perhaps {_LOOK.format(rank)}: {error}"
        ) from error
    own.append(f"join/call/{attempt}")
    if refusal is None:
        try:
            own.append(next_key(store, _INFOS))
            publish(store, own[-1], {"attempt": attempt, **about})
            answer = ask("result", partial(_result, nonce=nonce))
        except _torch_distributed.DistNetworkError as error:
            # Not a former world's store, with which another attempt may find the next one.
            raise DistStoreError(
                f"{where} rank 0 has called it, and ended its store: {error}",
                0,
            ) from error
        own.append(f"join/result/{attempt}")
    delete_keys(store, own)
    if refusal is None and "world" in answer:
        world = _store_of(store, answer["world"])
        if standby is not None:
            known: Checked = {"server": -1, "addresses": []}
            if answer["served"]:
                known = fetch(world, _SUCCESSION, partial(succession, size=size))
            standby.learn(world.scope, **known)
        return answer["world"], world
    store.set(f"join/read/{attempt}", "")
    raise _error(where, **(answer if refusal is None else refusal))


def _refusal(reason: str, missing: Sequence[int] = (), *, of_store: bool = False) -> dict[str, Any]:
    """Returns what rank 0 publishes of a world that does not come about, or for a process that has no part.

    Args:
        reason: text for all.
        missing: ranks that did not come in time.
        of_store: whether the store is at fault, or what somebody has written there.
    """
    return {"reason": reason, "missing": list(missing), "of_store": of_store}


def _error(where: str, reason: str, missing: list[int], of_store: bool) -> Exception:
    """Returns the error for what :func:`_refusal` has."""
    text = f"{where} {reason}"
    if missing or of_store:
        return DistStoreError(text, missing[0] if missing else -1, missing_ranks=missing)
    return ValueError(text)


def forget_joining(store: Any, size: int) -> None:
    """Deletes the keys of a store in which no other world will join; called by all ranks that have joined."""
    if int(store.add("join/left", 1)) == size:
        delete_keys(store, ["join/left", "join/attempts/0", _ATTEMPTS, _INFOS, _SERVED])


def _store_of(store: Any, world: str) -> PrefixStore:
    """Returns the part of a store that is a world's, by its random digits."""
    return PrefixStore(world, store, scope=f"{getattr(store, 'scope', '')}world {world}")


def _attempt(record: Any) -> Checked:
    """Checks an attempt, whose rank may be none of this world."""
    found = fields(record, rank=int, nonce=str, world_size=int, process=str)
    demand(found["rank"] > 0, f"an attempt of rank {found['rank']}")
    return found


def _served(record: Any) -> Checked:
    """Checks up to which numbers rank 0 has read, its last world, and the attempts left to the next one."""
    found = fields(record, attempts=int, infos=int, left=list, world=str, world_size=int)
    demand(found["attempts"] >= 0 and found["infos"] >= 0, f"{found}")
    demand(all(type(one) is int and 0 < one <= found["attempts"] for one in found["left"]), f"{found}")
    return found


def _call(record: Any) -> Checked | None:
    """Checks rank 0's call: ``None``, or why it refuses an attempt."""
    if record is None:
        return None
    found = fields(record, reason=str, missing=list, of_store=bool)
    demand(all(type(rank) is int for rank in found["missing"]), "missing ranks that are no numbers")
    return found


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
    demand(record is not None, "no reason")
    return _call(record) or {}


def _await_answer(
    store: Any,
    attempt: int,
    where: str,
    rank: int,
    timeout: timedelta,
    name: str,
    check: Callable[[Any], _T],
) -> _T:
    """Returns what rank 0 publishes for an attempt, checked."""
    key, limit = f"join/{name}/{attempt}", timeout + _ANSWER_GRACE
    first = min(_TELL_AFTER, limit)
    if not wait_for_keys(store, [key], first):
        if first < limit:
            why, seconds = _why_unanswered(store, rank), first.total_seconds()
            log.warning("%s rank 0 has not answered for %g s; %s", where, seconds, why)
        if not wait_for_keys(store, [key], limit - first):
            raise DistStoreError(
                f"{where} rank 0 did not answer within {timeout.total_seconds():g} s; "
                + _why_unanswered(store, rank),
                0,
            )
    try:
        return fetch(store, key, check)
    except DistStoreError as error:
        store.set(f"join/read/{attempt}", "")  # rank 0 may wait for that
        raise DistStoreError(f"{where} {error}") from error


def _why_unanswered(store: Any, rank: int) -> str:
    """Returns why rank 0 may not answer, by what the store tells of its last world."""
    served: Checked = fetch(store, _SERVED, _served) if store.check([_SERVED]) else {"world": ""}
    if served["world"]:
        size = served["world_size"]
        made = f"it has made a world of {size} ranks"
        if rank >= size:
            return f"{made}, in which there is no rank {rank}; give all ranks the same world_size"
        if not _store_of(store, served["world"]).check([f"leave/{rank}"]):
            return f"{made}, of which another process is rank {rank} and has not left; start every rank once"
    return f"either it did not come, or {_LOOK.format(rank)}{_where_met(store)}"


def _where_met(store: Any) -> str:
    """Returns as a sentence where ranks meet in a store of this package, and whom its server has refused."""
    root = root_of(store)
    if isinstance(root, TCPStore):
        return f". The store is at {root.host}:{root.port}{elsewhere(root)}.{refusals(root)}"
    if isinstance(root, FileStore):
        return f". The store is the file {root.path}, which all ranks must name and reach."
    if isinstance(root, (HashStore, TorchHashStore)):
        return ". The store is a HashStore, which no other process reaches; take a TCPStore or a FileStore."
    return ""


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
        self._where = f"[rank 0] {what}:"
        self._attempt = int(store.add("join/attempts/0", 1))
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        served: Checked = {"attempts": 0, "infos": 0, "left": [], "world": "", "world_size": 0}
        if store.check([_SERVED]):
            served = fetch(store, _SERVED, _served)
        most = _MOST_ATTEMPTS + 16 * size
        self._attempts = Announcements(store, _ATTEMPTS, most, served["attempts"])
        self._attempts.late = served["left"]
        self._infos = Announcements(store, _INFOS, most, served["infos"])
        self._former, self._former_size = served["world"], served["world_size"]
        self._known: dict[int, Checked] = {}
        self._beyond: list[int] = []
        self._called: dict[int, int] = {}
        self._refused: list[int] = []
        self._brought: dict[int, Checked] = {}
        self._joined: dict[int, Checked] = {}
        self._reason = ""
        self._twice: dict[int, str] = {}

    def join(self, standby: Standby | None) -> tuple[str, PrefixStore]:
        """Returns the new world's digits and store, or raises on all ranks."""
        refusal = self._refusal()
        if not refusal and self._former:  # nobody reads the keys of the world before
            old = [_SUCCESSION, *(f"leave/{r}" for r in range(self._size))]
            delete_keys(_store_of(self._store, self._former), old)
        digits = secrets.token_hex(_NONCE_BYTES)
        world = _store_of(self._store, digits)
        offers = [self._about, *(self._joined[r] for r in sorted(self._joined))]
        server = next((r for r, one in enumerate(offers) if one["serves"]), -1) if not refusal else -1
        known: Checked = {"server": server, "addresses": []}
        if server >= 0:
            known["addresses"] = [one["standby"] for one in offers]
            publish(world, _SUCCESSION, known)
        if refusal:
            self._answer(refusal, refusal)
            readers = [*self._refused, *(self._called[rank] for rank in self._joined)]
            wait_for_keys(self._store, [f"join/read/{each}" for each in readers], _READ_LIMIT)
            raise _error(self._where, **refusal)
        self._former, self._former_size = digits, self._size
        self._answer({"world": digits, "served": server >= 0})
        if standby is not None:
            standby.learn(world.scope, **known)
        return digits, world

    def _refusal(self) -> Checked:
        """Waits for all ranks; returns why there will be no world, as :func:`_refusal`, if so."""
        try:
            reason = self._call_all()
        except DistStoreError as error:  # such as what no rank of this job has written
            end = time.monotonic() + _OTHERS_LIMIT.total_seconds()
            while len(self._known) + len(self._attempts.late) < self._size - 1 and time.monotonic() < end:
                time.sleep(_ATTEMPT_CHECK.total_seconds())
                self._attempts.count()
            return _refusal(str(error), of_store=True)
        absent = [r for r in range(1, self._size) if r not in self._joined]
        if not reason and absent:
            reason = "; ".join([missing_text(absent, self._timeout), *self._twice.values()])
            return _refusal(f"{reason}{_where_met(self._store)}", absent)
        if not reason and int(self._store.add("join/attempts/0", 0)) != self._attempt:
            reason = f"another process has come as rank 0, beside {self._about['process']}"
        return _refusal(reason) if reason else {}

    def _call_all(self) -> str:
        """Calls the newest attempt of every rank until all have come; returns disagreements."""
        deadline = self._deadline
        root, told = root_of(self._store), False
        while not self._all_here() and time.monotonic() < deadline:
            wait_for_keys(self._store, self._expected(), min(_left(deadline), _ATTEMPT_CHECK))
            self._brought |= {info["attempt"]: info for info in self._infos.new(_info).values()}
            self._join_called()  # before newer processes come as the same ranks
            self._call_new()
            self._join_called()  # whom a former process of rank 0 has called already
            if not told and refusals(root):
                told = True
                log.warning("%s a rank may be missing%s", self._where, _where_met(root))
            if self._reason:
                deadline = min(deadline, time.monotonic() + _OTHERS_LIMIT.total_seconds())
        return self._reason

    def _all_here(self) -> bool:
        """Returns whether nobody else is expected; where sizes differ, that is by the largest of them."""
        largest = max([self._size, *(one["world_size"] for one in self._joined.values())])
        beyond = {self._known[attempt]["rank"] for attempt in self._beyond}
        return len(self._joined) == self._size - 1 and len(beyond) >= largest - self._size

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
        return keys or [self._attempts.key(self._attempts.counted + 1)]

    def _call_new(self) -> None:
        """Calls attempts, the newest of each rank, and refuses those of ranks that have joined."""
        calls: dict[str, Any] = {}
        for attempt, found in self._attempts.new(_attempt).items():
            self._known[attempt] = found
            rank, process = found["rank"], found["process"]
            if rank >= self._size:
                self._beyond.append(attempt)
            elif rank in self._joined:
                self._note_twice(rank, process, self._joined[rank]["process"])
                calls |= self._refuse(attempt, _refusal(self._twice[rank]))
            else:
                former, newest = sorted([attempt, self._called.get(rank, attempt)])
                self._called[rank] = newest
                calls[f"join/call/{newest}"] = None
                if former != newest:  # which may have read its call already
                    self._note_twice(rank, self._known[former]["process"], self._known[newest]["process"])
                    refusal = _refusal(self._twice[rank])
                    calls |= self._refuse(former, refusal) | self._result(former, refusal)
        publish_all(self._store, calls)

    def _note_twice(self, rank: int, refused: str, taken: str) -> None:
        """Notes that two processes have come as one rank, in words, and says so at once."""
        self._twice[rank] = (
            f"two processes have come as rank {rank}: {taken} is taken for it, and {refused} refused; start "
            "every rank once"
        )
        log.warning("%s %s", self._where, self._twice[rank])

    def _refuse(self, attempt: int, refusal: Checked) -> dict[str, Any]:
        self._refused.append(attempt)
        return {f"join/call/{attempt}": refusal}

    def _result(self, attempt: int, answer: Checked) -> dict[str, Any]:
        return {f"join/result/{attempt}": {**answer, "nonce": self._known[attempt]["nonce"]}}

    def _answer(self, answer: Checked, refusal: Checked | None = None) -> None:
        """Answers all that were called, and refuses processes that came as the same ranks meanwhile.

        Args:
            answer: for all.
            refusal: what that is where there is no world. Who comes now is left to the next one if ranks are
                missing, and gets it otherwise, as do ranks of a larger world where that is the reason.
        """
        calls: dict[str, Any] = {}
        # Before the answer: one that has read it may try again at once.
        if refusal is None or not (refusal["missing"] or refusal["of_store"]):
            self._call_new()
            self._attempts.late.clear()
        elif refusal["of_store"]:
            for attempt in self._attempts.late:  # which cannot be read
                calls |= self._refuse(attempt, refusal)
            self._attempts.late = []
        if refusal is not None and not refusal["missing"]:
            for attempt in self._beyond:
                calls |= self._refuse(attempt, refusal)
            self._beyond = []
        reached = {"attempts": self._attempts.counted, "infos": self._infos.counted}
        left = self._beyond + self._attempts.late
        former = {"world": self._former, "world_size": self._former_size}
        publish(self._store, _SERVED, {**reached, **former, "left": left})
        for attempt in self._called.values():
            calls |= self._result(attempt, answer)
        publish_all(self._store, calls)


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
