"""Turns of the threads that call NCCL for one device."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Issuing"]

_PATIENCE = 1.0
"""After so many seconds a thread in NCCL is not issuing, which takes microseconds, but making connections."""


class Issuing:
    """Lets one thread at a time issue operations on the communicators of a device, as NCCL asks.

    A call that makes connections stays in NCCL until the other ranks have made it, too. There another thread
    may be in the same position, which came first: all would wait for ever. So a thread goes past those that
    have been in NCCL for a second, if they use other communicators.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._inside: dict[int, tuple[int, Sequence[object], float]] = {}
        self._waiting = 0

    @contextmanager
    def turn(self, *communicators: object) -> Iterator[None]:
        """Waits for this thread's turn, which lasts as long as the ``with`` block.

        A thread may take another one within: what it issues may run code of the user's.

        Args:
            communicators: those that it calls.
        """
        turn = self.begin(communicators)
        try:
            yield
        finally:
            self.end(turn)

    def begin(self, communicators: Sequence[object]) -> int:
        """Waits for a turn as :meth:`turn` does; returns its number, for :meth:`end`, which must follow."""
        thread = threading.get_ident()
        with self._lock:
            if self._inside:
                self._wait(thread, communicators)
            turn = next(self._numbers)
            self._inside[turn] = thread, communicators, time.monotonic()
        return turn

    def end(self, turn: int) -> None:
        """Ends a turn."""
        with self._lock:
            del self._inside[turn]
            if self._waiting:
                self._changed.notify_all()

    def _wait(self, thread: int, communicators: Sequence[object]) -> None:
        self._waiting += 1
        try:
            while self._inside:
                seconds = self._seconds_to_wait(thread, communicators)
                if seconds is not None and seconds <= 0.0:
                    return
                self._changed.wait(seconds)
        finally:
            self._waiting -= 1

    def _seconds_to_wait(self, thread: int, communicators: Sequence[object]) -> float | None:
        """Returns after what time those inside may be passed; ``None`` where they must leave before."""
        latest = -math.inf
        for other, used, since in self._inside.values():
            if other == thread:
                continue
            if not set(communicators).isdisjoint(used):
                return None
            latest = max(latest, since)
        return latest + _PATIENCE - time.monotonic()
