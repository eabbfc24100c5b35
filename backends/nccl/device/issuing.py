"""Turns of the threads that call NCCL for one device."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

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
        self._inside: dict[_Turn, float] = {}
        self._waiting = 0

    def turn(self, *communicators: object) -> AbstractContextManager[None]:
        """Returns what waits for this thread's turn, which lasts as long as the ``with`` block.

        A thread may take another one within: what it issues may run code of the user's.

        Args:
            communicators: those that it calls.
        """
        return _Turn(self, communicators)

    def begin(self, turn: _Turn) -> None:
        """Waits until a turn may begin."""
        with self._lock:
            if self._inside:
                self._wait(turn)
            self._inside[turn] = time.monotonic()

    def end(self, turn: _Turn) -> None:
        """Ends a turn."""
        with self._lock:
            del self._inside[turn]
            if self._waiting:
                self._changed.notify_all()

    def _wait(self, turn: _Turn) -> None:
        self._waiting += 1
        try:
            while self._inside:
                seconds = self._seconds_to_wait(turn)
                if seconds is not None and seconds <= 0.0:
                    return
                self._changed.wait(seconds)
        finally:
            self._waiting -= 1

    def _seconds_to_wait(self, turn: _Turn) -> float | None:
        """Returns after what time those inside may be passed; ``None`` where they must leave before."""
        mine = set(turn.communicators)
        others = {other: since for other, since in self._inside.items() if other.thread != turn.thread}
        if any(not mine.isdisjoint(other.communicators) for other in others):
            return None
        return max(others.values(), default=-math.inf) + _PATIENCE - time.monotonic()


class _Turn:
    """One turn."""

    __slots__ = ("_turns", "communicators", "thread")

    def __init__(self, turns: Issuing, communicators: Sequence[object]) -> None:
        self._turns = turns
        self.communicators = communicators
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        self._turns.begin(self)

    def __exit__(self, *_: object) -> None:
        self._turns.end(self)
