"""A thread that watches the pending operations of one group.

Ten times a second, while any is pending or could be replayed in a CUDA graph, it checks whether one has
completed, has passed its time limit, or has met an error of its communicator. For one that has been pending
for a second the group asks the store about the other ranks.

All threads have ended when the interpreter does: torch's stores abort the process where a thread comes back
from them after that.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from typing import Protocol

from collectives.backends.nccl.operations.in_flight import PendingOperation
from collectives.backends.nccl.operations.replays import Replays
from collectives.logs import Log
from collectives.threads import start_thread

__all__ = ["Watchdog", "Watched"]

_TICK_SECONDS = 0.1
_SLOW_SECONDS = 1.0
"""How long an operation is pending before the group first asks about the other ranks, and how often then."""


_EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for all threads; a store that does not answer may hold them."""


class Watched(Protocol):
    """The part of a group that its watchdog uses; methods are called from the watchdog's thread."""

    def check_communicators(self) -> None:
        """Breaks the group if a communicator has met an error."""

    def expire(self, pending: PendingOperation) -> None:
        """Fails an operation that passed its time limit."""

    def check_peers(self, slow: PendingOperation | None) -> None:
        """Breaks the group if other ranks have ended it, or are gone; called for the oldest slow operation.

        Args:
            slow: the operation; ``None`` when none is slow any more.
        """

    def note_device_error(self, pending: PendingOperation, error: RuntimeError) -> None:
        """Breaks the group after the device has met an error."""


_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""Those whose thread has been started."""


@atexit.register
def _end_all() -> None:
    """Ends all threads, and waits for them; of a parent, whose locks a fork may have held, there are none."""
    watchdogs = [watchdog for watchdog in _running if watchdog.is_alive()]
    for watchdog in watchdogs:
        watchdog.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for watchdog in watchdogs:
        watchdog.join(deadline - time.monotonic())


class Watchdog:
    """Watches pending operations until they have ended.

    Args:
        group: the group; not kept alive.
        name: name of the thread.
        log: the group's.
    """

    def __init__(self, group: Watched, name: str, log: Log) -> None:
        self._group = weakref.ref(group)
        self._name = name
        self._log = log
        self._pending: list[PendingOperation] = []
        self._replays: list[Replays] = []
        self._replayed: list[PendingOperation] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._slow_reported = False
        self._next_peer_check = 0.0

    def watch(self, pending: PendingOperation) -> None:
        """Begins to watch an operation."""
        with self._lock:
            if self._thread is None:
                self._start()
            self._pending.append(pending)
            if len(self._pending) == 1:
                self._changed.notify()

    def watch_replays(self, replays: Replays) -> None:
        """Begins to watch operations in CUDA graphs, for good: nobody knows when those are replayed."""
        with self._lock:
            if replays not in self._replays:
                if self._thread is None:
                    self._start()
                self._replays.append(replays)
                self._changed.notify()

    def _start(self) -> None:
        if not self._stopped:
            self._thread = start_thread(self._run, self._name)
            _running.add(self)

    def pending(self) -> list[PendingOperation]:
        """Returns the operations that are not known to have ended, oldest first."""
        with self._lock:
            return list(self._pending)

    def oldest(self) -> PendingOperation | None:
        """Returns an operation that is under way, ``None`` where none is known to be."""
        with self._lock:
            return next(itertools.chain(self._pending, self._replayed), None)

    def stop(self) -> None:
        """Lets the thread end by itself, within a moment."""
        with self._lock:
            self._stopped = True
            self._changed.notify()

    def is_alive(self) -> bool:
        """Returns whether its thread runs in this process."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, at_most: float) -> None:
        """Waits for the end of the thread.

        Args:
            at_most: seconds; none where negative.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, at_most))

    def _run(self) -> None:
        while self._wait():
            group = self._group()
            if group is None:
                return
            try:
                self._check(group)
            except Exception:  # noqa: BLE001 - logged; other operations are looked after
                self._log.exception("%s: looking after operations failed; it goes on", self._name)
            del group

    def _wait(self) -> bool:
        """Waits for the next check; returns whether there is to be one."""
        with self._lock:
            while not (self._pending or self._replays or self._stopped):
                self._changed.wait()
            if not self._stopped:
                self._changed.wait(_TICK_SECONDS)
            return not self._stopped

    def _check(self, group: Watched) -> None:
        watched = self.pending()
        for pending in watched:
            try:
                ended = pending.ended()
            except RuntimeError as error:
                group.note_device_error(pending, error)
                ended = True
            if ended:
                with self._lock, contextlib.suppress(ValueError):
                    self._pending.remove(pending)
            elif time.monotonic() >= pending.deadline:
                group.expire(pending)
        self._check_replays(group)
        if watched or self._replayed:
            group.check_communicators()
        self._check_slow(group)

    def _check_replays(self, group: Watched) -> None:
        with self._lock:
            replays = list(self._replays)
        seen = [one for one in (some.poll() for some in replays) if one is not None and one.error is None]
        with self._lock:
            self._replayed = list(seen)
        for one in seen:
            if time.monotonic() >= one.deadline:
                group.expire(one)

    def _check_slow(self, group: Watched) -> None:
        now = time.monotonic()
        under_way = itertools.chain(self.pending(), self._replayed)
        slow = next((pending for pending in under_way if now - pending.began >= _SLOW_SECONDS), None)
        if slow is None:
            if self._slow_reported:
                group.check_peers(None)
                self._slow_reported = False
        elif now >= self._next_peer_check or not self._slow_reported:
            self._slow_reported = True
            self._next_peer_check = now + _SLOW_SECONDS
            group.check_peers(slow)
