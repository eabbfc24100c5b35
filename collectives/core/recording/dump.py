"""Dumps of the flight record: of all groups of this process, as JSON.

A dump has both clocks at one moment, the machine's boot and the process's rank, so that ``collectives trace``
can put the files of several ranks on one axis.

On a signal, a process that hangs is dumped, too. A handler of Python runs when the main thread gets back to
Python, which one that waits in a library for a lost rank may never do. So the interpreter's own handler
writes the signal's number to a pipe, at once (:func:`signal.set_wakeup_fd`), and a thread of this module
reads it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from collectives.forks import begin_anew_in_children
from collectives.logs import Log
from collectives.store.process import current_process

log = Log()

FORMAT = "collectives flight record 1"
"""What a dump calls itself."""

FILE_VARIABLE = "COLLECTIVES_FLIGHT_RECORD_FILE"
"""The beginning of the path of dumps, which goes on with the rank and ``.json``."""

_METRICS = {
    "count": ("operations_total", "Operations begun."),
    "bytes": ("bytes_total", "Bytes of their tensors on this rank."),
    "errors": ("errors_total", "Operations that failed."),
    "seconds": ("seconds_total", "Time between their begins and ends; operations that overlap count each."),
}


class RecordedGroup(Protocol):
    """A group as dumps see it."""

    @property
    def is_recorded(self) -> bool:
        """Whether dumps show it."""

    def _recorded(self) -> dict[str, Any]:
        """Returns what dumps tell of the group."""


class _Groups:
    """The groups of this process, which must not be kept alive."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may dump while its thread makes a group
        self._groups: dict[int, weakref.ref[RecordedGroup]] = {}
        self._made = 0
        self._changes = 0

    def add(self, group: RecordedGroup) -> None:
        with self._lock:
            self._groups = {number: kept for number, kept in self._groups.items() if kept() is not None}
            self._groups[self._made] = weakref.ref(group)
            self._made += 1
            self._changes += 1

    def note_change(self) -> None:
        """Takes note that a group has other members than before."""
        with self._lock:
            self._changes += 1

    @property
    def changes(self) -> int:
        """How often a group was made, or got other members."""
        return self._changes

    def all(self) -> list[RecordedGroup]:
        """Returns them in the order in which they were made."""
        with self._lock:
            found = [kept() for kept in self._groups.values()]
        return [group for group in found if group is not None]

    def recorded(self) -> list[dict[str, Any]]:
        """Returns what dumps tell of them, in the order in which they were made."""
        return [group._recorded() for group in self.all() if group.is_recorded]


groups = _Groups()
"""All groups of this process."""

begin_anew_in_children(groups)


def snapshot(reason: str) -> dict[str, Any]:
    """Returns the flight record of all groups, for JSON.

    Args:
        reason: why it is taken.
    """
    now, wall = time.monotonic_ns(), time.time_ns()
    recorded, own = groups.recorded(), current_process()
    return {
        "format": FORMAT,
        "reason": reason,
        "rank": _own_rank(recorded),
        "process": own.pid,
        "host": own.host,
        "boot": own.boot.hex() if any(own.boot) else own.host,
        "monotonic_ns": now,
        "time_ns": wall,
        "groups": recorded,
    }


def _own_rank(groups: Sequence[Mapping[str, Any]]) -> int:
    """Returns this process's rank in its largest group, which is the world; -1 without groups."""
    largest = max(groups, key=lambda group: int(group["size"]), default=None)
    if largest is None:
        return -1
    rank, known = int(largest["rank"]), largest["global_ranks"]
    return int(known[rank]) if rank < len(known) else rank  # while the group takes other members


def dump(path: str | Path | None, reason: str) -> Path:
    """Writes the flight record; the file is whole at every moment.

    Args:
        path: the file; ``None`` for the one that ``COLLECTIVES_FLIGHT_RECORD_FILE`` and the rank name.
        reason: why.

    Returns:
        The path.

    Raises:
        ValueError: there is no path, neither here nor in the environment.
        OSError: the file cannot be written.
    """
    values = snapshot(reason)
    if path is None:
        prefix = os.environ.get(FILE_VARIABLE, "")
        if not prefix:
            raise ValueError(
                f"the flight record needs a path: pass one, or set {FILE_VARIABLE} to the beginning of one"
            )
        path = f"{prefix}{values['rank']}.json"
    file = Path(path)
    draft = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_text(json.dumps(values), "utf-8")
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return file


def dump_at_error(reason: str) -> None:
    """Writes the flight record where the environment names a file; an error of that is logged only."""
    if not os.environ.get(FILE_VARIABLE):
        return
    own = Log(rank=_own_rank(groups.recorded()))
    try:
        file = dump(None, reason)
    except OSError as error:
        own.warning("the flight record could not be written: %s", error)
    else:
        own.warning("the flight record is in %s, because of %s", file, reason)


def prometheus_text() -> str:
    """Returns the totals of all groups in the text format of Prometheus."""
    recorded = groups.recorded()
    lines: list[str] = []
    for key, (metric, meaning) in _METRICS.items():
        lines += [f"# HELP collectives_{metric} {meaning}", f"# TYPE collectives_{metric} counter"]
        for group in recorded:
            for operation, totals in group["stats"].items():
                labels = {
                    "group": group["name"],
                    "backend": group["backend"],
                    "rank": str(group["rank"]),
                    "operation": operation,
                }
                text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
                lines.append(f"collectives_{metric}{{{text}}} {totals[key]}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# ---- on a signal -------------------------------------------------------------------------------------------

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
