"""Turns of the threads that call NCCL for one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import collectives._native as _native

__all__ = ["Issuing"]

_PATIENCE = 1.0
"""After so many seconds a thread in NCCL is not issuing, which takes microseconds, but making connections."""


class Issuing(_native.NcclTurns):
    """Lets one thread at a time issue operations on the communicators of a device, as NCCL asks.

    A call that makes connections stays in NCCL until the other ranks have made it, too. There another thread
    may be in the same position, which came first: all would wait for ever. So a thread goes past those that
    have been in NCCL for a second, if they use other communicators.

    ``begin`` waits for a turn as :meth:`turn` does, and returns its number, for ``end``, which must follow.
    """

    def __init__(self) -> None:
        super().__init__(_PATIENCE)

    @contextmanager
    def turn(self, *communicators: object) -> Iterator[None]:
        """Waits for this thread's turn, which lasts as long as the ``with`` block.

        A thread may take another one within: what it issues may run code of the user's.

        Args:
            communicators: those that it calls, which are told apart by identity.
        """
        turn = self.begin(list(communicators))
        try:
            yield
        finally:
            self.end(turn)
