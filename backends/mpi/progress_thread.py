"""The thread that makes progress in MPI groups while nobody waits for their operations."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from typing import Protocol

from collectives.threads import start_thread

__all__ = ["Progressing", "progress_thread"]


class Progressing(Protocol):
    """The part of a group's engine that the thread uses."""

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""

    def progress(self) -> bool | None:
        """Tests what is in flight; returns whether anything ended, ``None`` where nothing is in flight."""


class _ProgressThread:
    """One thread for all groups of the process, started when the first needs it."""

    _REST_SECONDS = 30e-6
    _LONGEST_REST_SECONDS = 1e-3

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: weakref.WeakSet[Progressing] = weakref.WeakSet()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def serve(self, group: Progressing) -> None:
        """Makes progress in a group from now on, until nothing of it is in flight."""
        self.start()
        with self._lock:
            self._groups.add(group)
        self._wanted.set()

    def start(self) -> None:
        """Sees to it that the thread is there, so that :meth:`serve` will not fail."""
        with self._lock:
            if self._thread is None and not self._ends:
                self._thread = start_thread(self._run, "collectives-mpi")

    def _run(self) -> None:
        rest = self._REST_SECONDS
        while not self._ends:
            self._wanted.clear()
            with self._lock:
                groups = list(self._groups)
            moved = False
            for group in groups:
                result = group.progress()
                moved = moved or bool(result)
                if result is None:
                    self._forget(group)
            if not groups:
                self._wanted.wait()
                rest = self._REST_SECONDS
                continue
            del groups
            rest = self._REST_SECONDS if moved else min(1.2 * rest, self._LONGEST_REST_SECONDS)
            time.sleep(rest)

    def _forget(self, group: Progressing) -> None:
        with self._lock:
            if group.idle:
                self._groups.discard(group)

    def close(self) -> None:
        """Ends the thread, so that it does not call an MPI that is being finalized."""
        self._ends = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


progress_thread = _ProgressThread()


def _start_over() -> None:
    """In a forked child, where the thread does not exist."""
    progress_thread.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)
atexit.register(progress_thread.close)
