"""Dumps of the flight record on a signal, also of a process that hangs.

A handler of Python runs when the main thread gets back to Python, which one that waits in a library for a
lost rank may never do. So the interpreter's own handler writes the signal's number to a pipe, at once
(:func:`signal.set_wakeup_fd`), and a thread of this module reads it there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from collectives.core.recording.dump import FILE_VARIABLE, dump_at_error
from collectives.logs import Log

__all__ = ["watch_for_signal"]

log = Log()

_SIGNAL = "COLLECTIVES_FLIGHT_RECORD_SIGNAL"

_lock = threading.Lock()
_watching = False


def watch_for_signal() -> None:
    """Dumps on every signal that the environment names, from now on; nothing where it names none.

    A program that sets a wakeup descriptor of its own, as :mod:`asyncio` does for signal handlers, takes it
    over, and no dumps are written then.

    Raises:
        ValueError: there is no such signal, or there is no path to dump to.
    """
    global _watching
    name = os.environ.get(_SIGNAL, "")
    if not name:
        return
    number = getattr(signal, name, None) if name.startswith("SIG") else None
    if not isinstance(number, signal.Signals):
        raise ValueError(f"{_SIGNAL} must be the name of a signal, such as SIGUSR1, but is {name!r}")
    if not os.environ.get(FILE_VARIABLE):
        raise ValueError(f"{_SIGNAL} is {name}, but {FILE_VARIABLE} does not say where to write")
    with _lock:
        if _watching:
            return
        _watching = True
    if threading.current_thread() is not threading.main_thread():
        log.warning("%s is not watched for: the first group was not made on the main thread", name)
        return
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
        log.warning("%s is not watched for: the program has a wakeup descriptor of its own", name)
        return
    os.set_blocking(read, True)
    signal.signal(number, _leave_to_thread)
    threading.Thread(target=_serve, args=(read, number), name="collectives-dump", daemon=True).start()
    os.register_at_fork(after_in_child=_stop_watching)


def _leave_to_thread(*_: object) -> None:
    """Handles the signal in the main thread, where nothing is to be done."""


def _serve(read: int, number: signal.Signals) -> None:
    while received := os.read(read, 512):
        if number in received:
            dump_at_error(f"the signal {number.name}")


def _stop_watching() -> None:
    """In a forked child, whose signals are none of its parent's; the thread does not exist there."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
