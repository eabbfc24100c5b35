"""A thread that watches the pending operations of one group.

Ten times a second, while any is pending or could be replayed in a CUDA graph, it checks whether one has
completed, has passed its time limit, or has met an error of its communicator. For one that has been pending
for a second the group asks the store about the other ranks.

All threads have ended when the interpreter does, those that abort communicators too: torch's stores, and
calls of NCCL, abort the process where a thread comes back from them after that.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
import weakref

from collectives.backends.nccl.communicators import Communicators
from collectives.backends.nccl.libnccl import NcclError
from collectives.backends.nccl.work import LOOK_SECONDS, Failures, PendingOperation, Replays
from collectives.threads import start_thread

_TICK_SECONDS = 0.1
_EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for all threads; a store that does not answer may hold them."""


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
    for watchdog in list(_running):
        watchdog._communicators.await_abort(deadline - time.monotonic())


class Watchdog:
    """Watches pending operations until they have ended.

    Args:
        failures: what ends the group.
        communicators: the group's.
        name: name of the thread.
    """

    def __init__(self, failures: Failures, communicators: Communicators, name: str) -> None:
        self._failures = failures
        self._communicators = communicators
        self._name = name
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
            try:
                self._check()
            except Exception:  # noqa: PERF203 - logged; other operations are looked after
                self._failures.log.exception("%s: looking after operations failed; it goes on", self._name)

    def _wait(self) -> bool:
        """Waits for the next check; returns whether there is to be one."""
        with self._lock:
            while not (self._pending or self._replays or self._stopped):
                self._changed.wait()
            if not self._stopped:
                self._changed.wait(_TICK_SECONDS)
            return not self._stopped

    def _check(self) -> None:
        watched = self.pending()
        for pending in watched:
            try:
                ended = pending.ended()
            except RuntimeError as error:
                self._failures.call_failed(pending, error)
                ended = True
            if ended:
                with self._lock, contextlib.suppress(ValueError):
                    self._pending.remove(pending)
            elif time.monotonic() >= pending.deadline:
                self._failures.expire_pending(pending)
        self._check_replays()
        if watched or self._replayed:
            self._check_communicators()
        self._check_slow()

    def _check_replays(self) -> None:
        with self._lock:
            replays = list(self._replays)
        polled = [some.poll() for some in replays]
        self._replayed = [one for one in polled if one is not None and one.error is None]
        for one in self._replayed:
            if time.monotonic() >= one.deadline:
                self._failures.expire_pending(one)

    def _check_communicators(self) -> None:
        for communicator in self._communicators.open():
            try:
                error = communicator.async_error()
            except NcclError as unknown:
                error = unknown
            if error is not None:
                self._failures.failed(self.oldest(), error)

    def _check_slow(self) -> None:
        now = time.monotonic()
        under_way = itertools.chain(self.pending(), self._replayed)
        slow = next((pending for pending in under_way if now - pending.began >= LOOK_SECONDS), None)
        if slow is None:
            if self._slow_reported:
                self._failures.publish_waiting(None)
                self._slow_reported = False
        elif now >= self._next_peer_check or not self._slow_reported:
            self._slow_reported = True
            self._next_peer_check = now + LOOK_SECONDS
            operation = slow.operation
            self._failures.publish_waiting(operation)
            self._failures.check_peers(operation, operation.about, slow.fail, slow.peers)
