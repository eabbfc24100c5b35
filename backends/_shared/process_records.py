"""Which rank is gone, for backends whose library tells only that a connection broke.

Every rank leaves a record of its process in the group's store. A rank that finds a connection broken looks
which recorded processes have ended, as far as it can see them, and which ranks published an exit reason.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from typing import Any

from collectives.backends._shared.exit_reasons import Departure
from collectives.errors import DistError, DistStoreError, PeerLostError
from collectives.store.error_records import error_of, record_of
from collectives.store.process import Life, ProcessIdentity, current_process
from collectives.store.records import demand, read, written

__all__ = ["Liveness"]

_SEARCH_SECONDS = 0.3
"""How long to look: a killed process closes its connections a little before the system calls it dead."""

_POLL_SECONDS = 0.01

_PUBLISH_SECONDS = 1.0
"""How long to wait for a store whose server may be the stopped process that is to blame."""

_ANY_DEPARTURE = "departures"
"""Key that is there as soon as a rank has published a departure, so that one look tells that none has."""


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
        own = current_process()
        if own.start:  # without /proc nobody is ever found dead
            key = f"process/{rank}"
            store.set(key, written(own.to_bytes().hex(), key))

    def publish_exit(self, reason: DistError | None) -> None:
        """Tells the others that this rank leaves; a store that no longer answers is not an error here."""
        self._publish(f"exit/{self._rank}", Departure(self._rank, reason))

    def publish_lost(self, departure: Departure) -> None:
        """Tells the others which rank is lost, so that those who cannot find out themselves name the same."""
        self._publish("lost", departure)

    def _publish(self, key: str, departure: Departure) -> None:
        rank, reason = departure
        record = written([rank, None if reason is None else record_of(reason)], key)

        def publish() -> None:
            with contextlib.suppress(Exception):
                self._store.set(key, record)
                self._store.set(_ANY_DEPARTURE, "1")

        thread = threading.Thread(target=publish, name="exit reason", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # at the interpreter's end no thread begins
            publish()
        else:
            thread.join(_PUBLISH_SECONDS)

    def withdraw(self) -> None:
        """Withdraws the own record: from now on the end of this process is no loss."""
        with contextlib.suppress(Exception):
            key = f"process/{self._rank}"
            self._store.set(key, written(None, key))

    def find_lost(self) -> Departure | None:
        """Returns a rank that is gone, ``None`` where none is found; within 0.3 s."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        while True:
            try:
                found = self.poll_lost()
            except Exception:  # noqa: BLE001 - the store went with the lost rank
                return None
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_SECONDS)

    def poll_lost(self) -> Departure | None:
        """Returns a rank that is gone, ``None`` where none is found; looks once.

        Raises the store's errors.
        """
        found = self._find_dead()
        if found is None and self._store.check([_ANY_DEPARTURE]):
            exits = (self._read(f"exit/{rank}") for rank in range(self._size) if rank != self._rank)
            found = self._read("lost") or next(filter(None, exits), None)
        return found

    def _find_dead(self) -> Departure | None:
        for rank in {*range(self._size)} - {self._rank, *self._records}:
            key = f"process/{rank}"
            if self._store.check([key]):
                record = bytes(self._store.get(key))
                self._records[rank] = record, _process(record, key)
        for rank, (record, process) in self._records.items():
            # A record may have been withdrawn since it was read.
            if process is not None and process.life() is Life.DEAD and self._is_current(rank, record):
                return Departure(rank, PeerLostError(f"its process {process.pid} has ended", rank))
        return None

    def _is_current(self, rank: int, record: bytes) -> bool:
        return bytes(self._store.get(f"process/{rank}")) == record

    def _read(self, key: str) -> Departure | None:
        return read(self._store.get(key), key, _departure) if self._store.check([key]) else None


def _departure(record: Any) -> Departure:
    """Checks what a rank published."""
    demand(isinstance(record, list) and len(record) == 2 and type(record[0]) is int, f"{record!r}")
    return Departure(record[0], None if record[1] is None else error_of(record[1]))


def _process(record: bytes, key: str) -> ProcessIdentity | None:
    """Returns the process of a record; ``None`` for one that was withdrawn, or is not as ranks publish it."""
    try:
        return read(record, key, _identity)
    except (DistStoreError, struct.error):
        return None


def _identity(record: Any) -> ProcessIdentity:
    demand(isinstance(record, str), f"{record!r}")
    return ProcessIdentity.from_bytes(bytes.fromhex(record))
