"""The threads that complete the futures of operations, and whose callbacks may wait for other operations.

The core says which thread completes what, and when (``engine/completions.hpp``). There is always one thread
more than are busy, as far as the system lets threads begin; those that are idle for long end.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

import collectives._native as _native
from collectives.forks import begin_anew_in_children
from collectives.logs import Log
from collectives.threads import start_thread

__all__ = ["complete_after", "complete_later", "next_operation"]

next_operation = _native.next_operation
"""Returns a number for an operation that is issued now."""

_Complete = Callable[[], None]

_EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for callbacks that run."""

_log = Log("collectives.futures")


class _Threads:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[int, _Complete] = {}
        self._threads: set[threading.Thread] = set()
        self._has_warned = False

    def expect(self, number: int, complete: _Complete) -> None:
        """Has ``complete`` called when the core says its number; raises where there is no thread for that."""
        with self._lock:
            if not self._threads:
                self._start()
            self._expected[number] = complete

    def _start(self) -> None:
        self._threads.add(start_thread(self._serve, "collectives-futures"))

    def _serve(self) -> None:
        while (taken := _native.pop_completion()) is not None:
            number, by_last = taken
            if by_last:
                self._start_another()
            with self._lock:
                complete = self._expected.pop(number, None)
            if complete is not None:  # a signal's handler may have raised in get_future(), called again since
                try:
                    complete()
                except Exception:  # noqa: BLE001 - the thread completes others
                    _log.exception("completing a future failed")
                del complete
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _start_another(self) -> None:
        """Starts a thread for what is due while this one is busy; tried again at the next completion."""
        with self._lock:
            try:
                self._start()
            except RuntimeError as error:
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning(
                        "no further thread for futures can be started (%s): a callback that waits holds up "
                        "all others",
                        error,
                    )

    def close(self) -> None:
        """Ends the threads."""
        _native.close_completions()
        with self._lock:
            threads = list(self._threads)
        deadline = time.monotonic() + _EXIT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


_threads = _Threads()


def complete_later(number: int, group: int, complete: _Complete, *, collective: bool) -> _Complete:
    """Has a thread complete the future of an operation once that has ended.

    Args:
        number: of the operation, from :func:`next_operation`.
        group: ``id()`` of what stands for its group.
        complete: completes the future.
        collective: whether the operation is a collective.

    Returns:
        What to call at the end of the operation, on any thread; returns at once.

    Raises:
        DistBackendError: no thread can be started.
    """
    _threads.expect(number, complete)
    return _native.Completion(number, group, collective).push


def complete_after(task: _native.HostTask, group: int, complete: _Complete) -> None:
    """Has a thread complete the future of an operation of the core once that has ended.

    Args:
        task: the operation.
        group: ``id()`` of what stands for its group.
        complete: completes the future.

    Raises:
        DistBackendError: no thread can be started.
    """
    _threads.expect(task.id, complete)
    task.notify(group)


begin_anew_in_children(_threads)
atexit.register(_threads.close)
