"""Dumps of the flight record: of all groups of this process, as JSON.

A dump has both clocks at one moment, the machine's boot and the process's rank, so that ``collectives trace``
can put the files of several ranks on one axis.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from collectives.core.recording.flight_record import FlightRecord, Totals
from collectives.logs import Log

__all__ = [
    "FILE_VARIABLE",
    "FORMAT",
    "RecordedGroup",
    "dump",
    "dump_at_error",
    "prometheus_text",
    "register",
    "snapshot",
]

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
    """The part of a group that dumps use."""

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Ranks of the members in the default group, by group rank."""

    def rank(self) -> int:
        """Returns this process's rank within the group."""

    def size(self) -> int:
        """Returns the number of ranks."""

    def name(self) -> str:
        """Returns the backend's name."""

    @property
    def group_name(self) -> str:
        """Name of the group."""

    @property
    def group_desc(self) -> str:
        """Free text that describes the group."""

    @property
    def flight_record(self) -> FlightRecord:
        """Its operations."""

    def stats(self) -> Totals:
        """Returns its totals."""


class _Groups:
    """The groups of this process, which must not be kept alive."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may dump while its thread makes a group
        self._groups: dict[int, weakref.ref[RecordedGroup]] = {}
        self._made = 0

    def add(self, group: RecordedGroup) -> None:
        with self._lock:
            self._groups = {number: kept for number, kept in self._groups.items() if kept() is not None}
            self._groups[self._made] = weakref.ref(group)
            self._made += 1

    def all(self) -> list[RecordedGroup]:
        """Returns them in the order in which they were made."""
        with self._lock:
            found = [kept() for kept in self._groups.values()]
        return [group for group in found if group is not None]


_groups = _Groups()


def _start_over() -> None:
    """In a forked child, which is no member of its parent's groups."""
    _groups.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)


def register(group: RecordedGroup) -> None:
    """Adds a group to those whose operations dumps show."""
    _groups.add(group)


def snapshot(reason: str) -> dict[str, Any]:
    """Returns the flight record of all groups, for JSON.

    Args:
        reason: why it is taken.
    """
    groups = _groups.all()
    now, wall = time.monotonic_ns(), time.time_ns()
    return {
        "format": FORMAT,
        "reason": reason,
        "rank": _own_rank(groups),
        "process": os.getpid(),
        "host": socket.gethostname(),
        "boot": _boot(),
        "monotonic_ns": now,
        "time_ns": wall,
        "groups": [_values(group) for group in groups],
    }


def _values(group: RecordedGroup) -> dict[str, Any]:
    record = group.flight_record
    operations = record.operations()
    return {
        "name": group.group_name,
        "description": group.group_desc,
        "backend": group.name(),
        "rank": group.rank(),
        "global_ranks": list(group.global_ranks),
        "begun": record.begun,
        "stats": group.stats(),
        "operations": [operation.values() for operation in operations],
    }


def _own_rank(groups: Sequence[RecordedGroup]) -> int:
    """Returns this process's rank in its largest group, which is the world; -1 without groups."""
    largest = max(groups, key=lambda group: group.size(), default=None)
    return -1 if largest is None else largest.global_ranks[largest.rank()]


def _boot() -> str:
    """Returns what tells the machine, and its start, from which the monotonic clock counts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


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
    log = Log(rank=_own_rank(_groups.all()))
    try:
        file = dump(None, reason)
    except OSError as error:
        log.warning("the flight record could not be written: %s", error)
    else:
        log.warning("the flight record is in %s, because of %s", file, reason)


def prometheus_text() -> str:
    """Returns the totals of all groups in the text format of Prometheus."""
    groups = _groups.all()
    lines: list[str] = []
    for key, (metric, meaning) in _METRICS.items():
        lines += [f"# HELP collectives_{metric} {meaning}", f"# TYPE collectives_{metric} counter"]
        for group in groups:
            for operation, totals in group.flight_record.totals().items():
                labels = {
                    "group": group.group_name,
                    "backend": group.name(),
                    "rank": str(group.rank()),
                    "operation": operation,
                }
                text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
                lines.append(f"collectives_{metric}{{{text}}} {totals[key]}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
