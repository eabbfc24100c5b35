"""Processes that would join a world say so in a store, and the world's members invite them.

A newcomer takes a number and leaves its handle under it. Members look at the numbers that nobody has dealt
with, say what their world is, ask who is behind them, and invite those that answer; the others are passed
over. A newcomer that would form another world does not answer, but fails. Whoever was passed over though it
lives, such as a process that was stopped meanwhile, sees that and takes another number. Nothing that a
newcomer writes, or leaves out, keeps members waiting for longer than a few seconds. One that is stopped after
it has answered does, for their time limit; one that dies or fails then refuses connections, and is left out.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import collectives._native as _native
from collectives.errors import CollectiveMismatchError, DistError, DistStoreError, GroupAbortedError
from collectives.logs import Log
from collectives.store.joining.agreement import first_word, forget, word_of
from collectives.store.joining.meeting_place import id_of
from collectives.store.prefix import PrefixStore
from collectives.store.records import Checked, as_text, demand, fields, publish, publish_all, read
from collectives.store.waiting import delete_keys, peek, wait_for_keys
from collectives.time_limits import left_until

log = Log()

_RECORD_LIMIT_S = 2.0
"""How long processes that have taken numbers may take to leave their handles; for all of them together."""
_ANSWER_LIMIT_S = 2.0
"""How long newcomers may take to answer; likewise."""
_MOST = 1024
"""How many numbers members look at in one call; whoever reaches the store may count on."""
_LOOK_AGAIN = timedelta(seconds=0.5)
"""How often a newcomer looks whether it was passed over."""
_PAUSE_S = 0.02


class Newcomer:
    """A process that would join.

    Args:
        store: a store that the members look into.
        handle: of this process.
        kind: what it would form, in words; must be the same on all members.
    """

    def __init__(self, store: Any, handle: str, kind: str) -> None:
        self._store = _part_of(store)
        self._handle = handle
        self._kind = kind
        self._seen: set[str] = set()
        self._latest = ""
        self._announce()

    def _announce(self) -> None:
        self._number = int(self._store.add("count", 1))
        publish(self._store, _handle_key(self._number), self._handle)

    def next_invitation(self, end: float) -> Checked | None:
        """Waits for members to invite this process, anew after each time; ``None`` where they do not.

        Args:
            end: when to give up, by ``time.monotonic()``.

        Returns:
            ``uuid`` and ``handles`` of the meeting.

        Raises:
            CollectiveMismatchError: they form something else.
        """
        store = self._store
        looked = time.monotonic()
        while time.monotonic() < end:
            key = _invitation_key(self._number)
            if wait_for_keys(store, [key], min(_LOOK_AGAIN, left_until(end))):
                found: Checked | None = _peek(store, key, _invitation)
                if found is not None and found["uuid"] not in self._seen:
                    self._latest = found["uuid"]
                    self._seen.add(self._latest)
                    self._demand_alike(found)
                    if found["handles"]:
                        return found
                    publish(store, _answer_key(self._number), found["uuid"])
                time.sleep(min(_PAUSE_S, left_until(end).total_seconds()))
            if time.monotonic() - looked >= _LOOK_AGAIN.total_seconds():
                looked = time.monotonic()
                if int(store.add("admitted", 0)) >= self._number:
                    delete_keys(store, _keys_of(self._number))  # an answer may have come too late
                    self._announce()
        return None

    def _demand_alike(self, theirs: Checked) -> None:
        """Raises where this process would break the members' world, since it cannot be part of it."""
        for key, mine, word in (("kind", self._kind, "form"), ("layout", _layout(), "have the layout")):
            if theirs[key] != mine:
                raise CollectiveMismatchError(
                    f"join_world: the members {word} {theirs[key]!r}, but this process would {word} "
                    f"{mine!r}; all must run the same version, and name the same backend"
                )

    def disinvited(self) -> DistError | None:
        """Returns the error where the members no longer do what they last invited this process to, if so."""
        with contextlib.suppress(Exception):  # then the meeting goes on without the store
            found: Checked | None = _peek(self._store, _invitation_key(self._number), _invitation)
            invited = found is None or found["uuid"] == self._latest
            if not invited or int(self._store.add("admitted", 0)) >= self._number:
                return GroupAbortedError(f"the members have given up the meeting {self._latest}")
        return None

    def leave(self) -> None:
        """Takes this process off the list."""
        store, number = self._store, self._number
        with contextlib.suppress(Exception):  # the store may have gone
            publish(store, _handle_key(number), "")  # members would wait for one that is missing
            delete_keys(store, [_invitation_key(number), _answer_key(number)])
            if int(store.add("admitted", 0)) >= number:  # asked last: members may have deleted it before
                delete_keys(store, _keys_of(number))


class Newcomers:
    """What the member that looks for newcomers sees, and tells them.

    Args:
        store: the store.
        kind: what the members form, in words.
    """

    def __init__(self, store: Any, kind: str) -> None:
        self._store = _part_of(store)
        self._kind = kind

    def waiting(self, patience: float) -> tuple[int, list[tuple[str, int]]]:
        """Returns how many numbers were looked at, and handle and number of each newcomer that answers.

        Args:
            patience: how many seconds to wait at most.

        Raises:
            DistError: the store failed, or counts what ranks do not write.
        """
        store = self._store
        after = int(store.add("admitted", 0))
        numbers = range(after + 1, min(int(store.add("count", 0)), after + _MOST) + 1)
        if not numbers:
            return 0, []
        share = patience / (_RECORD_LIMIT_S + _ANSWER_LIMIT_S)
        handles = self._collect(numbers, _handle_key, min(1.0, share) * _RECORD_LIMIT_S)
        known: set[str] = set()
        found: list[tuple[str, int]] = []
        for number, handle in handles.items():
            try:
                one = id_of(handle) if handle else ""
            except (ValueError, DistError) as error:
                log.warning("newcomer %d is left out: %s", number, error)
                continue
            if one and one not in known:
                known.add(one)
                found.append((handle, number))
        token = secrets.token_hex(8)
        self.invite(token, [], [number for _, number in found])
        answers = self._collect(
            [number for _, number in found], _answer_key, min(1.0, share) * _ANSWER_LIMIT_S, token
        )
        return len(numbers), [(handle, number) for handle, number in found if number in answers]

    def _collect(
        self, numbers: Iterable[int], key: Callable[[int], str], limit: float, wanted: str | None = None
    ) -> dict[int, str]:
        """Returns the texts that newcomers have left within a time limit, or those that are as wanted."""
        missing, found = [*numbers], {}
        end = time.monotonic() + limit
        while True:
            for number in [*missing]:
                if time.monotonic() >= end:  # over a slow network, one look at all of them may take longer
                    break
                try:
                    text = _peek(self._store, key(number), as_text)
                except DistStoreError as error:  # of what this one has written
                    log.warning("newcomer %d is left out: %s", number, error)
                    missing.remove(number)
                    continue
                if text is not None and wanted in (None, text):
                    found[number] = text
                    missing.remove(number)
            if not missing or time.monotonic() >= end:
                return dict(sorted(found.items()))
            time.sleep(_PAUSE_S)

    def invite(self, uuid: str, handles: Sequence[str], numbers: Iterable[int]) -> None:
        """Invites newcomers to a meeting; without handles, asks whether they are there."""
        invitation = {"uuid": uuid, "handles": list(handles), "kind": self._kind, "layout": _layout()}
        publish_all(self._store, {_invitation_key(number): invitation for number in numbers})

    def propose(self, name: str, plan: Checked) -> None:
        """Publishes what rank 0 plans, for members that cannot hear it by the group.

        Args:
            name: of this call of all members.
            plan: ``count``, numbers that it deals with, and ``left``, handles with their numbers.

        Raises:
            DistError: a member has given up before.
        """
        found = first_word(self._store, _plan_key(name), plan, _plan)
        if isinstance(found, DistError):
            raise found

    def plan_of(self, name: str, failure: DistError) -> Checked:
        """Returns the plan to a member whose group has failed; raises the failure where there is none."""
        found: Checked | DistError = failure
        with contextlib.suppress(Exception):  # this member may not reach the store
            found = first_word(self._store, _plan_key(name), failure, _plan)
        if isinstance(found, DistError):
            raise failure
        return found

    def claim(self, name: str, attempt: int, handle: str) -> None:
        """Lets one member alone begin an attempt; called by the first of those whom each takes to be left.

        Args:
            name: of the call.
            attempt: number of the attempt.
            handle: of this process.

        Raises:
            GroupAbortedError: another one has begun it, or the call is over for the others.
        """
        key, mine = _claim_key(name, attempt), id_of(handle)
        try:
            claimed = first_word(self._store, key, mine, as_text)
            over = not self._store.check([f"{_plan_key(name)}/outcome"])
        except Exception:  # noqa: BLE001 - the store has gone, for all of them
            return
        if over:
            forget(self._store, [key])
        if over or claimed != mine:
            raise _gone_on()

    def claimed_by_others(self, name: str, attempt: int, handle: str) -> DistError | None:
        """Returns the error where another process than that of a handle has begun an attempt."""
        claimed = None
        with contextlib.suppress(Exception):  # likewise
            claimed = word_of(self._store, _claim_key(name, attempt), as_text)
        return None if claimed in (None, id_of(handle)) else _gone_on()

    def forget(self, name: str, attempts: int) -> None:
        """Deletes what a call has left: the plan first, which is what tells that it is not over."""
        forget(self._store, [_plan_key(name), *(_claim_key(name, one) for one in range(1, attempts + 1))])

    def settle(self, count: int) -> None:
        """Takes the next numbers off the list: their processes are members now, or passed over.

        Args:
            count: how many there are.
        """
        last = int(self._store.add("admitted", count))
        for number in range(last - count + 1, last + 1):
            delete_keys(self._store, _keys_of(number))


def _layout() -> int:
    """Returns which processes this one can share memory with."""
    return int(_native.LAYOUT_VERSION)


def _part_of(store: Any) -> PrefixStore:
    return PrefixStore("newcomers", store)


def _handle_key(number: int) -> str:
    return f"handle/{number}"


def _invitation_key(number: int) -> str:
    return f"invitation/{number}"


def _answer_key(number: int) -> str:
    return f"answer/{number}"


def _plan_key(name: str) -> str:
    return f"plan/{name}"


def _claim_key(name: str, attempt: int) -> str:
    return f"claim/{name}.{attempt}"


def _gone_on() -> DistError:
    return GroupAbortedError("the other members have gone on without this process")


def _keys_of(number: int) -> list[str]:
    return [_handle_key(number), _invitation_key(number), _answer_key(number)]


def _peek(store: PrefixStore, key: str, check: Callable[[Any], Any]) -> Any:
    """Returns a record, checked; ``None`` where it is not there."""
    value = peek(store, key, by_get=True)
    return None if value is None else read(store, key, value, check)


def _plan(record: Any) -> Checked:
    """Checks what rank 0 plans."""
    found = fields(record, count=int, left=list)
    for one in found["left"]:
        demand(isinstance(one, list) and [*map(type, one)] == [str, int], f"{one!r} instead of a handle")
    return found


def _invitation(record: Any) -> Checked:
    """Checks what members tell a newcomer."""
    found = fields(record, uuid=str, handles=list, kind=str, layout=int)
    demand(all(isinstance(one, str) for one in found["handles"]), "handles that are no text")
    return found
