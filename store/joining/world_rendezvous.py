"""How ranks join and leave a world: one life of the default group, or a group that torch makes.

One store may serve several worlds, one after another. Every rank but the first announces an attempt to join,
which thereby has a number. Rank 0 makes random digits for the world and calls the newest attempt of each rank
with them; who has been called meets the others below these digits (``agreement.py``), where what a former
world or a process that died has left is not seen. They begin the scope of the world's store, so that what
ranks have written in another world proves nothing in this one.

The keys below need ``set``, ``get``, ``add``, ``wait`` and ``check`` of a store; where it can get and set
several keys at once, what rank 0 asks does not grow with the number of ranks.
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
from typing import Any

import torch.distributed as _torch_distributed
from torch._C._distributed_c10d import HashStore as TorchHashStore

from collectives.errors import CollectiveMismatchError, DistError, DistNetworkError, DistStoreError
from collectives.logs import Log
from collectives.secret import WAY_OUT
from collectives.store.file import FileStore
from collectives.store.joining.agreement import at, exchange, fail, told
from collectives.store.joining.standby import Standby, offer, succession
from collectives.store.memory import HashStore
from collectives.store.prefix import PrefixStore
from collectives.store.process import own_user_only, system
from collectives.store.records import (
    Announcements,
    Checked,
    demand,
    error_of,
    fetch,
    fields,
    publish,
    publish_all,
    record_of,
)
from collectives.store.tcp import TCPStore
from collectives.store.tcp.store import elsewhere, refusals
from collectives.store.waiting import delete_keys, missing_text, root_of, wait_for_keys
from collectives.time_limits import left_until

KEYS = "collectives"
"""Prefix of all our keys in a store that may have other users."""

_PROTOCOL = 8
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

_ATTEMPTS = "join/attempt"
"""Name under which attempts to join are announced."""

_SERVED = "join/served"
"""Key of the number up to which rank 0 has read them, and of those that it has left unanswered."""

_MEETING = "join"
"""Key of the exchange of a world's ranks, in its part of the store."""

_NONCE_BYTES = 16
_DIGITS = re.compile("[0-9a-f]{32}")

_MOST_ATTEMPTS = 1000
"""How many attempts rank 0 reads, and 16 more of each rank: processes may have come and died many times."""

log = Log()


def meet_world(
    store: Any,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    standby: Standby | None = None,
    what: str = "init_process_group",
) -> tuple[str, PrefixStore]:
    """Waits until all ranks of a world are here.

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
    where = f"[rank {rank}] {what}:"
    about = {
        "rank": rank,
        "nonce": secrets.token_hex(_NONCE_BYTES),
        "protocol": _PROTOCOL,
        "world_size": size,
        "backend": backend,
        "process": f"{socket.gethostname()}:{os.getpid()}",
        # Only ranks with a secret in common may be on several systems.
        "system": system() if size > 1 and own_user_only() else "",
        **({"serves": False, "standby": []} if standby is None else standby.offer()),
    }
    try:
        if rank == 0:
            digits, made = _Coordinator(store, about, timeout, where).join()
        else:
            digits, made = _follow(store, about, timeout, where)
    except CollectiveMismatchError as error:
        raise ValueError(str(at(where, error))) from error
    world = _store_of(store, digits)
    if standby is not None:
        standby.learn(world.scope, made["server"], made["addresses"])
    return digits, world


def _follow(store: Any, about: Checked, timeout: timedelta, where: str) -> tuple[str, Checked]:
    """Any other rank: attempts to join until rank 0 calls it; returns what :func:`_meet` does."""
    rank, attempt = about["rank"], int(store.add(_ATTEMPTS, 1))
    key, call = f"{_ATTEMPTS}/{attempt}", f"join/call/{attempt}"
    publish(store, key, about)

    def why(ranks: Sequence[int], died: bool) -> DistError:  # noqa: ARG001 - nobody tells
        return DistStoreError(missing_text(ranks, timeout), ranks[0], missing_ranks=ranks)

    while True:
        try:
            called = _await_call(store, call, where, rank, timeout)
        except _torch_distributed.DistNetworkError as error:
            raise DistNetworkError(
                f"{where} the store has failed before rank 0 has answered; perhaps {_LOOK.format(rank)}: "
                f"{error}"
            ) from error
        except DistStoreError:
            store.set(f"join/read/{attempt}", "")  # rank 0 may wait for that
            raise
        delete_keys(store, [call])
        if isinstance(called, DistError):
            delete_keys(store, [key])
            store.set(f"join/read/{attempt}", "")
            raise at(where, called)
        if called["nonce"] != about["nonce"]:
            raise DistStoreError(f"{where} the store holds under {call!r} an answer to another process")
        world = _store_of(store, called["world"])
        look = partial(_heed_call, store, call, called)
        try:
            # From now on: rank 0, which may have come late, waits for others that may come later still.
            made = _meet(world, about, timeout + _ANSWER_GRACE, where, why, look)
        except _CalledAgainError as again:
            if again.elsewhere:  # else another process may have come as this rank
                delete_keys(world, [f"{_MEETING}/{rank}", f"{_MEETING}/arrived"])
            continue
        except DistNetworkError as error:
            # Not a former world's store, with which another attempt may find the next one.
            raise DistStoreError(f"{where} rank 0 has called it, and ended its store: {error}", 0) from error
        except BaseException:
            delete_keys(store, [key])
            raise
        delete_keys(store, [key])
        return called["world"], made


class _CalledAgainError(Exception):
    """Rank 0 has called a process again: it has taken another one in its place, or has begun anew."""

    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.elsewhere = elsewhere


def _heed_call(store: Any, key: str, former: Checked) -> None:
    """Raises where there is another call than the former one, which some stores cannot delete."""
    if store.check([key]) and (found := fetch(store, key, _call)) != former:
        raise _CalledAgainError(isinstance(found, dict) and found["world"] != former["world"])


def _meet(
    world: Any,
    about: Checked,
    limit: timedelta,
    where: str,
    why: Callable[[Sequence[int], bool], DistError],
    look: Callable[[], object],
) -> Checked:
    """Returns who serves the store, and who would, once all ranks that were called have come."""
    rank, size = about["rank"], about["world_size"]
    made: Checked = exchange(
        world,
        _MEETING,
        rank,
        range(size),
        limit,
        where,
        record=about,
        check=_about,
        combine=_made,
        read=partial(_own_world, about=about),
        why=why,
        look=look,
    )
    return made


def _made(ranks: Sequence[Checked]) -> Checked:
    """Returns what :func:`_own_world` takes; raises where ranks disagree."""
    for rank, one in enumerate(ranks):
        if text := _disagreement(ranks[0], rank, one):
            raise CollectiveMismatchError(text)
    server = next((rank for rank, one in enumerate(ranks) if one["serves"]), -1)
    return {
        "nonces": [one["nonce"] for one in ranks],
        "processes": [one["process"] for one in ranks],
        "server": server,
        "addresses": [one["standby"] for one in ranks] if server >= 0 else [],
    }


def _own_world(record: Any, about: Checked) -> Checked:
    """Checks what a world is made of; raises where another process is this rank in it."""
    rank, size = about["rank"], about["world_size"]
    found = fields(record, nonces=list, processes=list)
    demand(len(found["nonces"]) == len(found["processes"]) == size, f"{len(found['nonces'])} ranks of {size}")
    if found["nonces"][rank] != about["nonce"]:
        raise CollectiveMismatchError(_twice(rank, about["process"], found["processes"][rank]))
    return succession(record, size)


def _twice(rank: int, refused: str, taken: str) -> str:
    return (
        f"two processes have come as rank {rank}: {taken} is taken for it, and {refused} refused; start "
        "every rank once"
    )


def forget_joining(store: Any, size: int) -> None:
    """Deletes the keys of a store in which no other world will join; called by all ranks that have joined."""
    if int(store.add("join/left", 1)) == size:
        delete_keys(store, ["join/left", "join/attempts/0", _ATTEMPTS, _SERVED])


def _store_of(store: Any, world: str) -> PrefixStore:
    """Returns the part of a store that is a world's, by its random digits."""
    return PrefixStore(world, store, scope=f"{getattr(store, 'scope', '')}world {world}")


def _about(record: Any) -> Checked:
    """Checks what a rank brings."""
    found = fields(
        record, rank=int, nonce=str, protocol=int, world_size=int, backend=str, process=str, system=str
    )
    return found | (offer(record) if found["protocol"] == _PROTOCOL else {})


def _attempt(record: Any) -> Checked:
    """Checks an attempt, whose rank may be none of this world."""
    found = _about(record)
    demand(found["rank"] > 0, f"an attempt of rank {found['rank']}")
    return found


def _served(record: Any) -> Checked:
    """Checks up to which number rank 0 has read, its last world, and the attempts left to the next one."""
    found = fields(record, attempts=int, left=list, world=str, world_size=int)
    demand(found["attempts"] >= 0, f"{found}")
    demand(all(type(one) is int and 0 < one <= found["attempts"] for one in found["left"]), f"{found}")
    return found


def _call(record: Any) -> Checked | DistError:
    """Checks rank 0's call: the world's digits for a process, or why it is refused."""
    if isinstance(record, dict) and "error" in record:
        return error_of(record["error"])
    found = fields(record, nonce=str, world=str)
    demand(_DIGITS.fullmatch(found["world"]) is not None, f"the world {found['world']!r}")
    return found


def _await_call(store: Any, key: str, where: str, rank: int, timeout: timedelta) -> Checked | DistError:
    """Returns rank 0's call of an attempt."""
    limit = timeout + _ANSWER_GRACE
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
        return fetch(store, key, _call)
    except DistStoreError as error:
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
    """Rank 0's part of :func:`meet_world`.

    Args:
        store: the store.
        about: what rank 0 brings.
        timeout: time limit.
        where: stands in front of a message.
    """

    def __init__(self, store: Any, about: Checked, timeout: timedelta, where: str) -> None:
        self._store = store
        self._about = about
        self._size: int = about["world_size"]
        self._where = where
        self._turn = int(store.add("join/attempts/0", 1))
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        served: Checked = {"attempts": 0, "left": [], "world": "", "world_size": 0}
        if store.check([_SERVED]):
            served = fetch(store, _SERVED, _served)
        self._attempts = Announcements(store, _ATTEMPTS, _MOST_ATTEMPTS + 16 * self._size, served["attempts"])
        self._attempts.late = served["left"]
        self._former, self._former_size = served["world"], served["world_size"]
        self._begin()
        self._beyond: dict[int, Checked] = {}
        self._refused: list[int] = []
        self._twice: dict[int, str] = {}
        self._meets = False

    def _begin(self) -> None:
        """Makes a world of nobody."""
        self._digits = secrets.token_hex(_NONCE_BYTES)
        self._world = _store_of(self._store, self._digits)
        self._called: dict[int, Checked] = {}

    def join(self) -> tuple[str, Checked]:
        """Returns the new world's digits and what :func:`_meet` does, or raises on all ranks."""
        try:
            self._call_all()
            self._meets = True
            limit = left_until(self._deadline)
            # Meanwhile processes may come in the place of those that have been called and died.
            made = _meet(self._world, self._about, limit, self._where, self._why, self._call_new)
        except (CollectiveMismatchError, DistStoreError) as error:
            text = str(error).removeprefix(f"{self._where} ")
            bare = type(error)(text, **error.details())
            self._refuse_others(bare)
            if not self._meets:  # else all have heard it there
                fail(self._world, _MEETING, 1 + len(self._called), bare)
            wait_for_keys(self._store, [f"join/read/{each}" for each in self._refused], _READ_LIMIT)
            raise at(self._where, bare) from error
        if self._former:  # nobody reads the keys of the world before
            delete_keys(_store_of(self._store, self._former), [f"leave/{r}" for r in range(self._size)])
        self._former, self._former_size = self._digits, self._size
        self._publish_served()
        return self._digits, made

    def _call_all(self) -> None:
        """Calls the newest attempt of every rank until all have come, or the limit has passed.

        Raises:
            CollectiveMismatchError: ranks disagree.
            DistStoreError: the store holds what no rank has written.
        """
        deadline, reason = self._deadline, ""
        root, warned = root_of(self._store), False
        try:
            while not self._all_here(reason) and time.monotonic() < deadline:
                awaited = self._attempts.late or [self._attempts.counted + 1]
                keys = [self._attempts.key(number) for number in awaited]
                wait_for_keys(self._store, keys, min(left_until(deadline), _ATTEMPT_CHECK))
                if self._called and (failed := told(self._world, _MEETING)):
                    if not failed.missing_ranks:
                        raise failed
                    self._begin()  # those who have met gave up before rank 0, and may come again
                self._call_new()
                if not warned and refusals(root):
                    warned = True
                    log.warning("%s a rank may be missing%s", self._where, _where_met(root))
                if not reason and (reason := self._live_disagreement()):
                    deadline = min(deadline, time.monotonic() + _OTHERS_LIMIT.total_seconds())
        except DistStoreError:  # such as what no rank of this job has written
            end = time.monotonic() + _OTHERS_LIMIT.total_seconds()
            while self._count_come() < self._size - 1 and time.monotonic() < end:
                time.sleep(_ATTEMPT_CHECK.total_seconds())
                self._attempts.count()
            raise
        if not reason and int(self._store.add("join/attempts/0", 0)) != self._turn:
            reason = f"another process has come as rank 0, beside {self._about['process']}"
        if reason:
            raise CollectiveMismatchError(reason)

    def _count_come(self) -> int:
        return len(self._called) + len(self._beyond) + len(self._attempts.late)

    def _all_here(self, reason: str) -> bool:
        """Returns whether nobody else is expected; where sizes differ, that is by the largest of them."""
        if len(self._called) < self._size - 1:
            return False
        if not any(_disagreement(self._about, rank, one) for rank, one in self._called.items()):
            return True
        largest = max(one["world_size"] for one in self._called.values())
        beyond = {one["rank"] for one in self._beyond.values()}
        return bool(reason) and len(beyond) >= largest - self._size

    def _live_disagreement(self) -> str:
        """Returns how one of those who have come since they were called differs: others may have died."""
        for rank, one in self._called.items():
            text = _disagreement(self._about, rank, one)
            if text and self._has_come(rank):
                return text
        return ""

    def _has_come(self, rank: int) -> bool:
        return bool(self._world.check([f"{_MEETING}/{rank}"]))

    def _call_new(self) -> None:
        """Calls attempts, the newest of each rank, and refuses those of ranks that have come."""
        calls: dict[str, Any] = {}
        for number, found in self._attempts.new(_attempt).items():
            rank = found["rank"]
            former = self._called.get(rank)
            found["number"] = number
            if rank >= self._size:
                self._beyond[number] = found
            elif former is not None and self._has_come(rank):
                calls |= self._refuse_second(rank, found, former)
            elif (self._meets or former is not None) and self._world.check([f"{_MEETING}/outcome"]):
                # Asked last: who has read it has deleted what tells that it has come, and may come anew.
                self._attempts.late.append(number)
            else:
                if former is not None:
                    calls |= self._refuse_second(rank, former, found)
                self._called[rank] = found
                calls[f"join/call/{number}"] = {"nonce": found["nonce"], "world": self._digits}
        publish_all(self._store, calls)

    def _why(self, ranks: Sequence[int], died: bool) -> DistError:  # noqa: ARG002 - nobody tells
        text = "; ".join([missing_text(ranks, self._timeout), *self._twice.values()])
        return DistStoreError(f"{text}{_where_met(self._store)}", ranks[0], missing_ranks=ranks)

    def _refuse_second(self, rank: int, refused: Checked, taken: Checked) -> dict[str, Any]:
        """Notes that two processes have come as one rank, and says so at once; returns the refusal's call."""
        self._twice[rank] = _twice(rank, refused["process"], taken["process"])
        log.warning("%s %s", self._where, self._twice[rank])
        self._refused.append(refused["number"])
        return {
            f"join/call/{refused['number']}": {"error": record_of(CollectiveMismatchError(self._twice[rank]))}
        }

    def _refuse_others(self, error: DistError) -> None:
        """Refuses processes that were not called; where ranks are missing, leaves them to the next world."""
        refused: list[int] = []
        if not error.missing_ranks:
            if isinstance(error, CollectiveMismatchError):
                with contextlib.suppress(DistStoreError):
                    refused += self._attempts.new(_attempt)
            else:  # which cannot be read
                refused += self._attempts.late
            self._attempts.late = []
            refused += self._beyond
            self._beyond = {}
        publish_all(self._store, {f"join/call/{each}": {"error": record_of(error)} for each in refused})
        self._refused += refused
        self._publish_served()

    def _publish_served(self) -> None:
        left = [*self._beyond, *self._attempts.late]
        former = {"world": self._former, "world_size": self._former_size}
        publish(self._store, _SERVED, {"attempts": self._attempts.counted, "left": left, **former})


def _disagreement(mine: Checked, rank: int, theirs: Checked) -> str:
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
