"""Which rank is gone, for backends whose library tells only that a connection broke.

Every rank leaves a record of its process in the group's store. A rank that finds a connection broken looks
which recorded processes have ended, as far as it can see them, and which ranks published an exit reason.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterable
from typing import Any

from collectives.store.process import Life, ProcessIdentity, current_process

__all__ = ["Liveness"]

_SEARCH_SECONDS = 0.3
"""How long to look: a killed process closes its connections a little before the system calls it dead."""

_POLL_SECONDS = 0.01

_WITHDRAWN = "withdrawn"

_ANY_EXIT = "exits"
"""Key that is there as soon as a rank has published an exit reason, so that one look tells that none has."""


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
        self._records: dict[int, str] = {}
        own = current_process()
        if own.start:  # without /proc nobody is ever found dead
            store.set(f"process/{rank}", own.to_bytes().hex())

    def publish_exit(self, reason: str) -> None:
        """Tells the others that this rank leaves; a store that no longer answers is not an error here."""
        with contextlib.suppress(Exception):
            self._store.set(f"exit/{self._rank}", reason)
            self._store.set(_ANY_EXIT, "1")

    def publish_lost(self, rank: int, how: str) -> None:
        """Tells the others which rank is lost, so that those who cannot find out themselves name the same."""
        with contextlib.suppress(Exception):
            self._store.set("lost", f"{rank} {how}")

    def withdraw(self) -> None:
        """Withdraws the own record: from now on the end of this process is no loss."""
        with contextlib.suppress(Exception):
            self._store.set(f"process/{self._rank}", _WITHDRAWN)

    def find_lost(self) -> tuple[int, str]:
        """Returns a rank that is gone and how it left, or ``(-1, "")`` where none is found; within 0.3 s."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        while True:
            try:
                found = self.poll_lost()
            except Exception:  # noqa: BLE001 - the store went with the lost rank
                return -1, ""
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                return -1, ""
            time.sleep(_POLL_SECONDS)

    def poll_lost(self) -> tuple[int, str] | None:
        """Returns a rank that is gone and how it left, ``None`` where none is found; looks once.

        Raises the store's errors.
        """
        found = self._find_dead() or self._read_lost()
        if found is None and self._store.check([_ANY_EXIT]):
            others = [rank for rank in range(self._size) if rank != self._rank]
            found = next(iter(self._read("exit", others).items()), None)
        return found

    def _read(self, key: str, ranks: Iterable[int]) -> dict[int, str]:
        """Returns the values of a key of those of the ranks that set it."""
        return {
            rank: self._store.get(f"{key}/{rank}").decode()
            for rank in ranks
            if self._store.check([f"{key}/{rank}"])
        }

    def _find_dead(self) -> tuple[int, str] | None:
        if len(self._records) < self._size - 1:
            missing = {*range(self._size)} - {self._rank, *self._records}
            self._records |= self._read("process", missing)
        for rank, record in self._records.items():
            process = _process(record)
            # A record may have been withdrawn since it was read.
            if process is not None and process.life() is Life.DEAD and self._is_current(rank, record):
                return rank, f"its process {process.pid} has ended"
        return None

    def _is_current(self, rank: int, record: str) -> bool:
        current: bool = self._store.get(f"process/{rank}").decode() == record
        return current

    def _read_lost(self) -> tuple[int, str] | None:
        if not self._store.check(["lost"]):
            return None
        rank, _, how = self._store.get("lost").decode().partition(" ")
        return int(rank), how


def _process(record: str) -> ProcessIdentity | None:
    """Returns the process of a record; ``None`` for one that was withdrawn or cannot be read."""
    try:
        return ProcessIdentity.from_bytes(bytes.fromhex(record))
    except (ValueError, struct.error):
        return None
