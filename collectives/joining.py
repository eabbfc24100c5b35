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
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as _torch_distributed

from collectives.errors import CollectiveMismatchError, DistStoreError

__all__ = ["join_group", "join_world", "leave_world", "wait_for_keys", "wait_for_leavers"]

_PROTOCOL = 1
"""Number of the key layout; ranks that differ in it refuse each other."""

_HERE = "here"

_HEARING_LIMIT = timedelta(seconds=3)
"""How long rank 0, which may serve the store, stays for ranks that it has refused to read why."""

_VERDICT_GRACE = timedelta(seconds=5)
"""How much longer than rank 0 the others wait, so that they hear which ranks are missing."""


def join_world(store: Any, rank: int, size: int, backend: str, timeout: timedelta) -> int:
    """Waits until all ranks of a world are here; returns the world's number, never used before on this store.

    Rank 0 waits for one new knock of every other rank, compares what they bring, and answers each knock. An
    answer belongs to one knock, so that neither a former world nor a try that failed can be taken for this
    one, whatever process made it.

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
    about = json.dumps(
        {
            "protocol": _PROTOCOL,
            "world_size": size,
            "backend": backend,
            "process": f"{socket.gethostname()}:{os.getpid()}",
        }
    )
    knock = int(store.add(f"join/knocks/{rank}", 1))
    store.set(f"join/knock/{rank}/{knock}", about)
    if rank == 0:
        return _receive(store, size, json.loads(about), knock, timeout)
    answer_key = f"join/answer/{rank}/{knock}"
    if not wait_for_keys(store, [answer_key], timeout + _VERDICT_GRACE):
        raise DistStoreError(
            f"[rank {rank}] init_process_group: rank 0 did not answer within {timeout.total_seconds():g} s; "
            "either it did not come, or it "
            f"has taken another process as rank {rank}: look at rank 0, and start every rank once"
        )
    answer = json.loads(store.get(answer_key))
    if "world" in answer:
        return int(answer["world"])
    store.set(f"join/heard/{rank}/{knock}", "heard")
    kind = DistStoreError if answer["missing"] else ValueError
    raise kind(f"[rank {rank}] init_process_group: {answer['reason']}")


def _receive(store: Any, size: int, about: dict[str, Any], knock: int, timeout: timedelta) -> int:
    """Rank 0's part of :func:`join_world`."""
    deadline = time.monotonic() + timeout.total_seconds()
    served = {r: int(store.add(f"join/served/{r}", 0)) for r in range(1, size)}
    reason, missing = "", False
    for r in range(1, size):
        if not wait_for_keys(store, [f"join/knock/{r}/{served[r] + 1}"], _left(deadline)):
            absent = [q for q in range(r, size) if not store.check([f"join/knock/{q}/{served[q] + 1}"])]
            reason, missing = _absent(absent or [r], timeout), True
            break
        reason = _disagreement(about, r, _latest_knock(store, r)[1])
        if reason:
            break
    newest = int(store.add("join/knocks/0", 0))
    if not reason and newest != knock:
        other = _latest_knock(store, 0)[1].get("process")
        reason = f"another process has come as rank 0: {other}, beside {about['process']}"
    world = int(store.add("join/worlds", 1))
    answer = {"reason": reason, "missing": missing} if reason else {"world": world}
    heard = [key for r in range(1, size) for key in _answer(store, r, served[r], answer)]
    if reason:
        wait_for_keys(store, heard, _HEARING_LIMIT)
        kind = DistStoreError if missing else ValueError
        raise kind(f"[rank 0] init_process_group: {reason}")
    return world


def _answer(store: Any, rank: int, served: int, answer: dict[str, Any]) -> list[str]:
    """Answers the newest knock of a rank, and refuses other processes that came as the same rank.

    Returns the keys that those who are refused will set.
    """
    newest, about = _latest_knock(store, rank)
    heard = []
    for knock in range(served + 1, newest + 1):
        older = _knock(store, rank, knock)
        if knock == newest:
            text = json.dumps(answer)
        elif older.get("process") != about.get("process"):
            reason = f"another process has come as rank {rank}: {about['process']} after {older['process']}"
            text = json.dumps({"reason": reason, "missing": False})
        else:
            continue
        store.set(f"join/answer/{rank}/{knock}", text)
        heard.append(f"join/heard/{rank}/{knock}")
    if newest > served:
        store.add(f"join/served/{rank}", newest - served)
    return heard


def _latest_knock(store: Any, rank: int) -> tuple[int, dict[str, Any]]:
    """Returns the newest knock of a rank whose content is there, and the content."""
    number = int(store.add(f"join/knocks/{rank}", 0))
    while number > 1 and not store.check([f"join/knock/{rank}/{number}"]):
        number -= 1
    return number, _knock(store, rank, number)


def _knock(store: Any, rank: int, number: int) -> dict[str, Any]:
    key = f"join/knock/{rank}/{number}"
    return dict(json.loads(store.get(key))) if number > 0 and store.check([key]) else {}


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
    store: Any, key: str, rank: int, members: Sequence[int], request: str, timeout: timedelta
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

    Raises:
        CollectiveMismatchError: another rank asks for a different group at this turn.
        DistStoreError: a member did not come in time; names all that are missing.
    """
    conflict = _conflict(store, f"{key}/first", rank, request)
    store.set(f"{key}/here/{rank}", conflict or _HERE)
    if not conflict and rank in members:
        conflict = _wait_for_members(store, key, rank, members, timeout)
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


def _wait_for_members(store: Any, key: str, rank: int, members: Sequence[int], timeout: timedelta) -> str:
    """Returns the conflict that one of the members came with; empty where all agree."""
    keys = [f"{key}/here/{member}" for member in members]
    if not wait_for_keys(store, keys, timeout):
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
