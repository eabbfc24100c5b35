"""Which rank is gone, for backends whose library tells only that a connection broke.

Every rank leaves a record of its process in the group's store. A rank that finds a connection broken looks
which recorded processes have ended, as far as it can see them, and which ranks published an exit reason.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

from collectives.backends._shared.exit_reasons import Departure
from collectives.errors import DistBackendError, DistError, DistStoreError, PeerLostError
from collectives.store.process import Life, ProcessIdentity, current_process
from collectives.store.records import demand, error_of, fetch, publish, read, record_of
from collectives.store.waiting import delete_keys
from collectives.threads import start_thread

__all__ = ["Liveness"]

_SEARCH_SECONDS = 0.3
"""How long to look: a killed process closes its connections a little before the system calls it dead."""

_POLL_SECONDS = 0.01

_PUBLISH_SECONDS = 1.0
"""How long to wait for a store whose server may be the stopped process that is to blame."""

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
        thread.join(_PUBLISH_SECONDS)


class Liveness:
    """The process records and exit reasons of a group's ranks.

    Args:
        store: the group's store.
        rank: this process's rank within the group.
        size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._records: dict[int, tuple[bytes, ProcessIdentity | None]] = {}
        self._next_asked = 0
        own = current_process()
        if own.start:  # without /proc nobody is ever found dead
            publish(store, f"process/{rank}", own.to_bytes().hex())

    def publish_exit(self, reason: DistError | None) -> None:
        """Tells the others that this rank leaves; a store that no longer answers is not an error here."""
        self._publish(f"exit/{self._rank}", Departure(self._rank, reason))

    def publish_lost(self, departure: Departure) -> None:
        """Tells the others which rank is lost, so that those who cannot find out themselves name the same."""
        self._publish("lost", departure)

    def _publish(self, key: str, departure: Departure) -> None:
        rank, reason = departure
        record = [rank, None if reason is None else record_of(reason)]

        def tell() -> None:
            with contextlib.suppress(Exception):
                publish(self._store, key, record)
                self._store.set(_ANY_DEPARTURE, "1")

        _soon(tell)

    def leave(self, also: Callable[[], None]) -> None:
        """Takes the records away where all other ranks have called this, too; nobody reads them any more.

        Args:
            also: called then.
        """

        def count() -> None:
            with contextlib.suppress(Exception):
                if self._store.add(_LEFT, 1) == self._size:
                    own = [f"{kind}/{rank}" for kind in ("process", "exit") for rank in range(self._size)]
                    delete_keys(self._store, [*own, "lost", _ANY_DEPARTURE, _LEFT])
                    also()

        _soon(count)

    def withdraw(self) -> None:
        """Withdraws the own record: from now on the end of this process is no loss."""
        with contextlib.suppress(Exception):
            publish(self._store, f"process/{self._rank}", None)

    def find_lost(self) -> Departure | None:
        """Returns a rank that is gone, ``None`` where none is found; within 0.3 s."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        while True:
            try:
                found = self.poll_lost()
            except Exception:  # noqa: BLE001 - the store went with the lost rank
                found = next(self._ended(), None)
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_SECONDS)

    def poll_lost(self) -> Departure | None:
        """Returns a rank that is gone, ``None`` where none is found; looks once.

        Raises the store's errors.
        """
        self.read_records()
        found = next(self._ended(), None)
        if found is None and self._store.check([_ANY_DEPARTURE]):
            exits = (self._read(f"exit/{rank}") for rank in range(self._size) if rank != self._rank)
            found = self._read("lost") or next(filter(None, exits), None)
        return found

    def lost_ranks(self, cause: DistError | None) -> list[int]:
        """Returns the ranks whose processes are seen to have ended, and the one whose loss broke the group.

        Args:
            cause: what broke the group.
        """
        with contextlib.suppress(Exception):  # the store went with one of them
            self.read_records()
        known = [cause.rank] if isinstance(cause, PeerLostError) and cause.rank >= 0 else []
        return sorted({*known, *(ended.rank for ended in self._ended())})

    def read_records(self) -> None:
        """Reads the records that are there and not known yet: ends show then though the store ends, too.

        Asks for a few of those that are not all there, in turn, so that many ranks may wait for many.

        Raises the store's errors.
        """
        ranks = [r for r in range(self._size) if r != self._rank and r not in self._records]
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

    def _ended(self) -> Iterator[Departure]:
        for rank, (record, process) in sorted(self._records.items()):
            if process is not None and process.life() is Life.DEAD and self._is_current(rank, record):
                yield Departure(rank, PeerLostError(f"its process {process.pid} has ended", rank))

    def _is_current(self, rank: int, record: bytes) -> bool:
        """Returns whether a rank has not withdrawn its record since, as far as the store still tells."""
        try:
            return bytes(self._store.get(f"process/{rank}")) == record
        except Exception:  # noqa: BLE001 - the store went with a rank
            return True

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
