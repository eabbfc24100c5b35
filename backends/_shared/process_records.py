"""Which rank is gone, for backends whose library tells only that a connection broke.

Every rank leaves a card in the group's store: the machine, the process namespace and the process with its
start time. A rank that finds a connection broken looks which of the processes on its own machine no longer
run, and which ranks left a farewell.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Liveness"]

_SEARCH_SECONDS = 0.3
"""How long to look: a killed process closes its connections a little before the system calls it dead."""

_POLL_SECONDS = 0.01

_WITHDRAWN = "withdrawn - -"


def _machine() -> str:
    """Identifies the running system and its process namespace; process numbers mean the same within one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').readlink()}"


def _start_of(pid: int) -> str | None:
    """Returns the start time of a process, ``None`` where it ended (a zombie has)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else fields[19]


class Liveness:
    """The cards of a group's ranks.

    Args:
        store: the group's store.
        rank: this process's rank within the group.
        size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._machine: str | None = None
        self._cards: dict[int, str] = {}
        with contextlib.suppress(OSError):  # without /proc nobody is ever found dead
            self._machine = _machine()
            store.set(f"card/{rank}", f"{self._machine} {os.getpid()} {_start_of(os.getpid())}")

    def farewell(self, reason: str) -> None:
        """Tells the others that this rank leaves; a store that no longer answers is not an error here."""
        with contextlib.suppress(Exception):
            self._store.set(f"farewell/{self._rank}", reason)

    def verdict(self, rank: int, how: str) -> None:
        """Tells the others which rank is lost, so that those who cannot find out themselves name the same."""
        with contextlib.suppress(Exception):
            self._store.set("lost", f"{rank} {how}")

    def withdraw(self) -> None:
        """Takes the own card away: from now on the end of this process is no loss."""
        with contextlib.suppress(Exception):
            self._store.set(f"card/{self._rank}", _WITHDRAWN)

    def find_lost(self) -> tuple[int, str]:
        """Returns a rank that is gone and how it left, or ``(-1, "")`` where none is found; within 0.3 s."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        while True:
            try:
                found = self.look()
            except Exception:  # noqa: BLE001 - the store went with the lost rank
                return -1, ""
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                return -1, ""
            time.sleep(_POLL_SECONDS)

    def look(self) -> tuple[int, str] | None:
        """Returns a rank that is gone and how it left, ``None`` where none is found; looks once.

        Raises the store's errors.
        """
        return self._find_dead() or self._read_verdict() or self._find_farewell()

    def _others(self, key: str) -> list[tuple[int, str]]:
        """Returns the values of a key of the other ranks that set it."""
        return [
            (rank, self._store.get(f"{key}/{rank}").decode())
            for rank in range(self._size)
            if rank != self._rank and self._store.check([f"{key}/{rank}"])
        ]

    def _find_dead(self) -> tuple[int, str] | None:
        if len(self._cards) < self._size - 1:
            self._cards = dict(self._others("card"))
        for rank, card in self._cards.items():
            machine, pid, start = card.split(" ")
            if machine == self._machine and _start_of(int(pid)) != start and self._holds(rank, card):
                return rank, f"its process {pid} has ended"
        return None

    def _holds(self, rank: int, card: str) -> bool:
        """Returns whether the card of a rank still stands; it may have been withdrawn since it was read."""
        stands: bool = self._store.get(f"card/{rank}").decode() == card
        return stands

    def _read_verdict(self) -> tuple[int, str] | None:
        if not self._store.check(["lost"]):
            return None
        rank, _, how = self._store.get("lost").decode().partition(" ")
        return int(rank), how

    def _find_farewell(self) -> tuple[int, str] | None:
        return next(iter(self._others("farewell")), None)
