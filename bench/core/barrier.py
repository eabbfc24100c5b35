"""A barrier of the ranks on one machine that belongs to no peer and lets them go close together."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SpinBarrier", "barrier_memory"]

LINE_BYTES = 128
"""Distance of the ranks' cells: two cache lines, because processors fetch lines in pairs."""

SPINS_BEFORE_YIELD = 100
"""Reads of the waiting loop, about 5 us, before the processor is offered to others: the rank that is waited
for may need it."""


@contextmanager
def barrier_memory(size: int) -> Iterator[str]:
    """Context with the path of fresh shared memory for :class:`SpinBarrier`.

    Processes of the same user can open it meanwhile. Nothing is left in a file system.

    Args:
        size: number of ranks.
    """
    descriptor = os.memfd_create("collectives-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size * LINE_BYTES)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


class SpinBarrier:
    """Barrier; call it on every rank.

    Each rank counts its arrivals in a cell of its own and spins until no other count is behind. The rank that
    arrives last goes on at once, and the others as soon as they see it: far closer together than any peer's
    own barrier would let them go, and the same for all peers.

    Args:
        path: of :func:`barrier_memory`.
        rank: the rank that this process is.
        size: number of ranks.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size * LINE_BYTES)
        self._counts = memoryview(self._map).cast("q")
        stride = LINE_BYTES // 8
        self._mine = rank * stride
        self._others = [other * stride for other in range(size) if other != rank]
        self._count = 0
        available = len(os.sched_getaffinity(0))
        self._spins = SPINS_BEFORE_YIELD if size <= available else 0

    def __call__(self) -> None:
        """Blocks, spinning, until every rank has called as often as this one."""
        counts = self._counts
        self._count = count = self._count + 1
        counts[self._mine] = count
        for other in self._others:
            spins = self._spins
            while counts[other] < count:
                if spins:
                    spins -= 1
                else:
                    os.sched_yield()

    def close(self) -> None:
        """Gives the memory back."""
        self._counts.release()
        self._map.close()
