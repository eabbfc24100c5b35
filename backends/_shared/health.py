"""The health of a group: which rank is gone, what broke the group, and what its operations raise then.

For backends whose library tells one rank nothing of another's end. Every rank leaves a record of its process
in the group's store, and there it publishes why it left (:mod:`collectives.backends._shared.exit_reasons`)
and which operation it waits in. A rank that finds a connection broken, or waits for long, looks which
recorded processes have ended, as far as it can see them, and what the others have published.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import compress
from typing import Any, ClassVar, TypeVar

from collectives.backends._shared.bounded_calls import BoundedCalls, NoAnswer
from collectives.backends._shared.exit_reasons import (
    Departure,
    aborted_by,
    blamed,
    departure_of,
    limit_reason,
    refuse_broken,
    stopped_by,
)
from collectives.backends._shared.operation import Operation
from collectives.core.process_group import ProcessGroup
from collectives.core.work import without_frames
from collectives.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
)
from collectives.store import PrefixStore
from collectives.store.process import Life, ProcessIdentity, current_process
from collectives.store.records import as_text, demand, error_of, fetch, publish, read, record_of
from collectives.store.waiting import delete_keys
from collectives.threads import start_thread

_T = TypeVar("_T")

_SEARCH_SECONDS = 1.0
"""How long to look: a killed process closes its connections a little before the system calls it dead, and a
rank that gives up waits no longer than this for the store to take its reason."""

_POLL_SECONDS = 0.01

_STORE_SECONDS = 1.0
"""How long the store may take, whose server may be the stopped process that is to blame: time limits must not
wait for it."""

_SLOW_STORE_SECONDS = 2.5
"""How long it may take after a connection broke, when nothing else tells why; it may be overloaded."""

_SHUT_DOWN_SECONDS = 3.0
"""How long an operation may need a rank that has shut the group down: its last messages arrive."""

_ANY_DEPARTURE = "departures"
"""Key that is there as soon as a rank has published a departure, so that one look tells that none has."""

_MOST_ASKED = 16
"""How many ranks' records a look asks for one by one."""

_LEFT = "left"
"""Key with the number of ranks that have left."""


def _soon(use_store: Callable[[], None]) -> None:
    """Runs what uses a store that may never answer; blocks for a second at most."""
    try:
        thread = start_thread(use_store, "exit reason")
    except DistBackendError:  # at the interpreter's end no thread begins
        use_store()
    else:
        thread.join(_STORE_SECONDS)


class Health:
    """What broke a group, for which ranks, and what they tell each other of it.

    Thread safety: every method may be called from any thread.

    Args:
        store: the group's store.
        rank: this process's rank within the group.
        size: number of ranks.
        where: rank and group, to stand in front of a message.

    Attributes:
        rank: this rank.
        size: number of ranks.
        where: rank and group.
        cause: what broke the group.
        left: how this rank has ended the group; empty before.
        over: whether the group is broken or has ended, and :meth:`refuse` raises.
        lock: held while the first cause is noted.
    """

    _told_seconds: ClassVar[float] = 3.0
    """After what time all ranks that wait in an operation have said so."""

    _alone: ClassVar[str] = "There are no other ranks"
    """What is said of the others where there are none."""

    def __init__(self, store: Any, rank: int, size: int, where: str) -> None:
        self._store = PrefixStore("health", store)
        self.rank = rank
        self.size = size
        self.where = where
        self.cause: DistError | None = None
        self._elsewhere = False
        self.left = ""
        self.over = False
        self.lock = threading.RLock()
        self._asking = BoundedCalls("store")
        self._shut_down_seen: float | None = None
        self._records: dict[int, tuple[bytes, ProcessIdentity | None]] = {}
        self._next_asked = 0
        own = current_process()
        if own.start:  # without /proc nobody is ever found dead
            publish(self._store, f"process/{rank}", own.to_bytes().hex())

    # ---- what breaks the group -----------------------------------------------------------------------------

    def _stop(self, tell: Callable[[], None]) -> None:
        """Ends what is under way, once; calls ``tell``, which tells the other ranks and may take a second."""
        tell()

    def break_by(
        self,
        cause: DistError,
        told: Departure | None = None,
        first: Callable[[DistError], object] | None = None,
        elsewhere: bool = False,
    ) -> bool:
        """Breaks the group for a cause; returns ``False`` where it was broken before.

        Args:
            cause: the cause.
            told: what the other ranks are told: which rank is to blame, and why.
            first: fails the operation in which it was found, which gets this very error.
            elsewhere: whether another rank has given up.
        """
        with self.lock:
            if self.cause is not None:
                return False
            self.cause, self._elsewhere = without_frames(cause), elsewhere  # which would hold the group
            self.over = True
            if first is not None:
                first(cause)
        self._stop(lambda: None if told is None else self.publish(told))
        return True

    def end(self, how: str = "the group was shut down") -> bool:
        """Notes that this rank ends the group; returns whether it had not done so before."""
        with self.lock:
            ends = not self.left
            self.left, self.over = self.left or how, True
        return ends

    def abort(self) -> bool:
        """Ends the group, and breaks it here and on its peers; returns whether it had not ended before."""
        ends = self.end("the group was aborted by this rank")
        if ends:
            broken, reason = aborted_by(self.where, self.rank)
            self.break_by(broken, Departure(self.rank, reason))
        return ends

    def break_for(self, cause: DistError) -> None:
        """Breaks the group for what broke another one of the same ranks."""
        if not self.left:
            self.break_by(cause, departure_of(cause, self.rank), elsewhere=True)

    def expire(self, operation: Operation, first: Callable[[DistError], object], hint: str = "") -> None:
        """Breaks the group for an operation that passed its time limit.

        Args:
            operation: the operation.
            first: fails it.
            hint: what else to say.
        """
        if self.cause is not None:
            return
        missing, elsewhere = self._other_ranks(operation)
        expired = CollectiveTimeoutError(
            f"{self.where} {operation}: passed its time limit of {operation.timeout.total_seconds():g} s. "
            f"{elsewhere}{hint}",
            missing[0] if missing else -1,
            missing_ranks=missing,
            **operation.about,
        )
        self.break_by(expired, Departure(self.rank, limit_reason(expired)), first)

    def check_peers(
        self,
        what: object,
        about: dict[str, Any],
        first: Callable[[DistError], object] | None = None,
        needed: Collection[int] | None = None,
    ) -> None:
        """Breaks the group if another rank is gone or has given up.

        Args:
            what: what waits, in words.
            about: attributes of the error that tell it.
            first: fails it.
            needed: the ranks that it needs; ``None`` for all.
        """
        # Where the store is gone or does not answer, the time limit remains.
        found, _ = self._ask(self.poll_lost)
        if found is not None and (found.reason is not None or self._misses(found.rank, needed)):
            self.break_by(blamed(f"{self.where} {what}:", found, about), found, first, elsewhere=True)

    def check_missing(self, what: str, needed: Collection[int] | None = None) -> None:
        """Raises if the group is broken, or has to be because ranks that are waited for will not come.

        Args:
            what: what waits, in words.
            needed: the ranks that it needs; ``None`` for all.
        """
        self.check_peers(what, {}, needed=needed)
        if self.cause is not None:
            raise without_frames(self.cause)

    def _misses(self, rank: int, needed: Collection[int] | None) -> bool:
        """Returns whether a rank that has shut the group down keeps others from going on."""
        if needed is not None and rank not in needed:
            return False
        if self._shut_down_seen is None:
            self._shut_down_seen = time.monotonic()
        return time.monotonic() - self._shut_down_seen >= _SHUT_DOWN_SECONDS

    # ---- what operations raise -----------------------------------------------------------------------------

    def refuse(self, what: object) -> None:
        """Raises if the group is broken or has ended.

        Args:
            what: the operation that is about to begin.

        Raises:
            DistBackendError: it is; the class is that of the first cause.
        """
        cause = self.cause
        if cause is not None:
            refuse_broken(f"{self.where} {what}:", cause, bool(self.left))
        if self.left:
            raise GroupAbortedError(f"{self.where} {what}: {self.left}")

    def stopped_error(self, operation: Operation) -> DistError:
        """Returns the error of an operation that the end of the group stopped."""
        cause = self.cause or GroupAbortedError(self.left)
        return stopped_by(f"{self.where} {operation}:", cause, elsewhere=self._elsewhere)

    # ---- what ranks wait in --------------------------------------------------------------------------------

    def publish_waiting(self, what: object) -> None:
        """Tells the others which operation of this rank is slow; ``None`` for none any more."""
        text = "" if what is None else str(what)
        self._ask(lambda: publish(self._store, f"waiting/{self.rank}", text))

    def _other_ranks(self, operation: Operation) -> tuple[list[int], str]:
        """Returns which ranks had not come, and what each waits in; as far as they have published it."""
        read_words, error = self._ask(self._read_waiting)
        if read_words is None:  # it went with a rank, or somebody else writes to it
            if isinstance(error, NoAnswer):
                return [], "The store does not answer, so that nobody knows what the other ranks wait in"
            return [], f"Nothing is known of the other ranks, as the group's store does not say: {error}"
        # All who wait in it have said so by then, and nobody leaves it before all have come.
        tells = operation.needs_all and operation.timeout.total_seconds() > self._told_seconds
        unknown = {rank: word for rank, word in read_words.items() if isinstance(word, DistStoreError)}
        waiting = {rank: word for rank, word in read_words.items() if isinstance(word, str)}
        came = {rank for rank, text in waiting.items() if text.partition(" (")[0] == operation.short}
        missing = [rank for rank in waiting if tells and rank not in came]
        said = self._waits(waiting)
        said += [f"nothing is known of rank {rank}: {error}" for rank, error in unknown.items()]
        return missing, "; ".join(said) or self._alone

    def _read_waiting(self) -> dict[int, str | DistStoreError]:
        """Returns what each other rank has said that it waits in, or why its word does not count."""
        found: dict[int, str | DistStoreError] = {}
        for rank in range(self.size):
            key = f"waiting/{rank}"
            if rank != self.rank:
                value = self._store.get(key) if self._store.check([key]) else None
                try:
                    found[rank] = "" if value is None else read(self._store, key, value, as_text)
                except DistStoreError as error:
                    found[rank] = error
        return found

    def _waits(self, waiting: Mapping[int, str]) -> list[str]:
        """Returns in words what ranks wait in; empty where one has said nothing."""
        return [
            f"rank {rank} waits in {text or 'no operation of this group'}" for rank, text in waiting.items()
        ]

    # ---- who is gone ---------------------------------------------------------------------------------------

    def _ask(
        self, function: Callable[[], _T], seconds: float = _STORE_SECONDS
    ) -> tuple[_T | None, Exception | None]:
        """Returns what the store answers, or why it does not; raises only what a signal's handler does."""

        def answer() -> tuple[_T | None, Exception | None]:
            try:
                return function(), None
            except Exception as error:  # noqa: BLE001 - returned
                return None, error

        try:
            return self._asking(answer, seconds)
        except NoAnswer as error:
            return None, error

    def publish(self, departure: Departure) -> None:
        """Tells the others which rank is gone; those who cannot find out themselves name the same.

        A store that no longer answers is not an error here.
        """
        rank, reason = departure
        key = f"exit/{rank}" if rank == self.rank else "lost"
        record = [rank, None if reason is None else record_of(reason)]

        def tell() -> None:
            with contextlib.suppress(Exception):
                publish(self._store, key, record)
                self._store.set(_ANY_DEPARTURE, "1")

        _soon(tell)

    def leave(self) -> None:
        """Takes the records away where all other ranks have called this, too; nobody reads them any more."""

        def count() -> None:
            with contextlib.suppress(Exception):
                if self._store.add(_LEFT, 1) == self.size:
                    kinds = ("process", "exit", "waiting")
                    own = [f"{kind}/{rank}" for kind in kinds for rank in range(self.size)]
                    delete_keys(self._store, [*own, "lost", _ANY_DEPARTURE, _LEFT])
                    self._delete_keys()

        _soon(count)

    def _delete_keys(self) -> None:
        """Deletes what else the group's ranks have written; called on the last one to leave."""

    def withdraw(self) -> None:
        """Withdraws the own record: from now on the end of this process is no loss."""
        with contextlib.suppress(Exception):
            publish(self._store, f"process/{self.rank}", None)

    def find_lost(self) -> Departure | None:
        """Returns a rank that is gone, ``None`` where none is found within a second, or 2.5 of a slow store.

        As long again where an earlier question to the store has no answer yet.
        """
        found, error = self._ask(self._find_lost, _SLOW_STORE_SECONDS)
        return found if error is None else next(self._ended(asks=False), None)

    def _find_lost(self) -> Departure | None:
        deadline = time.monotonic() + _SEARCH_SECONDS
        while True:
            last = time.monotonic() >= deadline
            try:
                found = self.poll_lost()
            except Exception:  # noqa: BLE001 - the store went with the lost rank
                found = next(self._ended(), None)
            if found is not None or last:
                return found
            time.sleep(_POLL_SECONDS)

    def poll_lost(self) -> Departure | None:
        """Returns a rank that is gone, ``None`` where none is found; looks once.

        Raises the store's errors.
        """
        self.read_records()
        found = next(self._ended(), None)
        if found is None and self._store.check([_ANY_DEPARTURE]):
            exits = (self._read(f"exit/{rank}") for rank in range(self.size) if rank != self.rank)
            found = self._read("lost") or next(filter(None, exits), None)
        return found

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes are seen to have ended, and that whose loss broke the group."""
        cause = self.cause
        known = {cause.rank} if isinstance(cause, PeerLostError) and cause.rank >= 0 else set()
        ended, _ = self._ask(self._seen_to_end)
        if ended is None:  # the store does not answer
            ended = {departure.rank for departure in self._ended(asks=False)}
        return sorted(known | ended)

    def _seen_to_end(self) -> set[int]:
        with contextlib.suppress(Exception):  # the store went with one of them
            self.read_records()
        return {ended.rank for ended in self._ended()}

    def read_records(self) -> None:
        """Reads the records that are there and not known yet: ends show then though the store ends, too.

        Asks for a few of those that are not all there, in turn, so that many ranks may wait for many.

        Raises the store's errors.
        """
        ranks = [r for r in range(self.size) if r != self.rank and r not in self._records]
        keys = [f"process/{r}" for r in ranks]
        if keys and not self._store.check(keys):
            first = self._next_asked % len(ranks)
            ranks = [*ranks[first:], *ranks[:first]][:_MOST_ASKED]
            self._next_asked = first + _MOST_ASKED
            keys = [f"process/{r}" for r in ranks]
            here = [self._store.check([key]) for key in keys]
            ranks, keys = list(compress(ranks, here)), list(compress(keys, here))
        several = keys and self._store.has_extended_api()
        values = self._store.multi_get(keys) if several else map(self._store.get, keys)
        for rank, key, value in zip(ranks, keys, values, strict=True):
            self._records[rank] = bytes(value), self._process(key, bytes(value))

    def _ended(self, asks: bool = True) -> Iterator[Departure]:
        for rank, (record, process) in sorted(self._records.items()):
            if process is None or process.life() is not Life.DEAD:
                continue
            if not (asks and self._has_withdrawn(rank, record)):
                yield Departure(rank, PeerLostError(f"its process {process.pid} has ended", rank))

    def _has_withdrawn(self, rank: int, record: bytes) -> bool:
        """Returns whether a rank has withdrawn its record since, as far as the store still tells."""
        try:
            return bytes(self._store.get(f"process/{rank}")) != record
        except Exception:  # noqa: BLE001 - the store went with a rank
            return False

    def _process(self, key: str, record: bytes) -> ProcessIdentity | None:
        """Returns the process of a record; ``None`` for one withdrawn, or that is not as ranks publish it."""
        try:
            return read(self._store, key, record, _identity)
        except (DistStoreError, struct.error):
            return None

    def _read(self, key: str) -> Departure | None:
        return fetch(self._store, key, _departure) if self._store.check([key]) else None


def _departure(record: Any) -> Departure:
    """Checks what a rank published."""
    demand(isinstance(record, list) and len(record) == 2 and type(record[0]) is int, f"{record!r}")
    return Departure(record[0], None if record[1] is None else error_of(record[1]))


def _identity(record: Any) -> ProcessIdentity:
    demand(isinstance(record, str), f"{record!r}")
    return ProcessIdentity.from_bytes(bytes.fromhex(record))


class MonitoredGroup(ProcessGroup):
    """Base of the groups that have a :class:`Health`, anew for each time that their ranks connect."""

    _health: Health

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, as far as this one sees, or whose loss is known."""
        return self._health.lost_ranks()

    def _first_cause(self) -> DistError | None:
        return self._health.cause

    def _find_cause(self) -> DistError | None:
        self._health.check_peers("it was asked what broke it", {})
        return self._health.cause

    def _break_for(self, cause: DistError) -> None:
        self._health.break_for(cause)
