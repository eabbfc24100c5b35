"""Debugging: how much to check and to say, flight records of all groups, and a breakpoint on one rank.

The environment is that of ``torch.distributed``: ``TORCH_DISTRIBUTED_DEBUG`` is ``OFF`` (default), ``INFO``
or ``DETAIL``; ``TORCH_CPP_LOG_LEVEL`` and the level together choose what the logger ``collectives`` lets
through; ``TORCH_SHOW_CPP_STACKTRACES=1`` logs the call stack where ranks call different operations.
"""

from __future__ import annotations

import bdb
import ctypes
import enum
import functools
import logging
import os
import pdb  # noqa: T100 - the class, not a breakpoint left behind
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from collectives.api.world_state import default_group
from collectives.core.operations import BARRIER
from collectives.core.process_group import ProcessGroup
from collectives.core.recording import dump
from collectives.logs import Log
from collectives.time_limits import time_limit

__all__ = [
    "DebugLevel",
    "breakpoint",
    "dump_flight_record",
    "flight_record",
    "get_debug_level",
    "prometheus_text",
    "set_debug_level",
    "set_debug_level_from_env",
]

log = Log()
logger = log.logger

_TRACE = 5
"""Level below ``logging.DEBUG``."""


class DebugLevel(enum.IntEnum):
    """How much to check and to say."""

    OFF = 0
    INFO = 1
    """Says more, when groups and DDP models are made and when they fail."""
    DETAIL = 2
    """Also compares every collective over all ranks before it runs; slow."""


_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Returns how much groups check and tell.

    Returns:
        What was set last; at first what ``TORCH_DISTRIBUTED_DEBUG`` says.
    """
    if _level is None:
        set_debug_level_from_env()
    return DebugLevel.OFF if _level is None else _level


def set_debug_level(level: DebugLevel) -> None:
    """Sets the level, for groups made from now on; to be the same on all ranks.

    Args:
        level: ours, or that of ``torch.distributed``.

    Raises:
        TypeError: it is no :class:`DebugLevel`, neither ours nor that of ``torch.distributed``.
    """
    global _level
    name = str(getattr(level, "name", None))
    if name not in DebugLevel.__members__:
        raise TypeError(f"level must be a DebugLevel, but is {level!r} of type {type(level).__name__}")
    _level = DebugLevel[name]
    _set_log_level(_level)


def set_debug_level_from_env() -> None:
    """Sets the level to that of ``TORCH_DISTRIBUTED_DEBUG``.

    Raises:
        ValueError: it is set to something else than ``OFF``, ``INFO`` or ``DETAIL``.
    """
    text = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "") or "OFF"
    if text.upper() not in DebugLevel.__members__:
        raise ValueError(f"TORCH_DISTRIBUTED_DEBUG must be OFF, INFO or DETAIL, but is {text!r}")
    set_debug_level(DebugLevel[text.upper()])


def _set_log_level(level: DebugLevel) -> None:
    """Sets what the logger lets through, where the user has set ``TORCH_CPP_LOG_LEVEL``."""
    chosen = os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper()
    if chosen not in {"INFO", "WARNING", "ERROR"}:
        return
    if chosen == "INFO":
        logger.setLevel({DebugLevel.OFF: logging.INFO, DebugLevel.INFO: logging.DEBUG}.get(level, _TRACE))
    else:
        logger.setLevel(chosen)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def checked(group: ProcessGroup, *, detail: bool = False) -> ProcessGroup:
    """Returns ``group``; at level DETAIL inside a group that compares calls, even if it compares some itself.

    Backends compare what they need, which is not the shapes of tensors of one size.

    Args:
        group: the group.
        detail: whether the caller asks for the comparison, whatever the level is.
    """
    wanted = detail or get_debug_level() >= DebugLevel.DETAIL
    if not wanted or (group.size() == 1 and not group.supports_reconfigure):  # which may get more members
        return group
    from collectives.core.checked_group import CheckedGroup

    return CheckedGroup(group)


_hits: Counter[tuple[str, int]] = Counter()
"""Calls of :func:`breakpoint` so far, by place in the source."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:  # noqa: A001
    """Stops one rank in the debugger while all others wait; called by all ranks with the same arguments.

    The debugger opens in the caller's frame; ``continue`` lets all ranks go on.

    Args:
        rank: rank of the default group to stop.
        skip: number of calls from this place in the source to let pass first.
        timeout_s: how long the others wait, in seconds; ``None`` for the default group's time limit.

    Raises:
        ValueError: the default group has no such rank, or ``timeout_s`` is not positive.
        CollectiveTimeoutError: the debugger was left open for longer.
    """
    group = default_group()
    if not 0 <= rank < group.size():
        raise ValueError(
            f"[rank {group.rank()}] breakpoint: rank is {rank}, but the ranks of the default group are 0 to "
            f"{group.size() - 1}"
        )
    limit = None if timeout_s is None else time_limit(timedelta(seconds=timeout_s))
    caller: FrameType = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno)
    _hits[place] += 1
    if _hits[place] <= skip:
        log.of(group).warning("breakpoint: call %d of %d to skip", _hits[place], skip)
        return
    if group.rank() != rank:
        group.call(BARRIER, timeout=limit, async_op=False).wait()
        return
    debugger = Debugger()
    debugger.message(f"[rank {rank}] breakpoint; the other ranks wait until 'continue'")
    debugger.stop_at(caller)
    group.call(BARRIER, timeout=limit, async_op=False).wait()
    debugger.follow(caller)


def flight_record() -> dict[str, Any]:
    """Returns the last operations of all groups of this process, as plain data.

    Each process asks for itself; nothing is sent, and running operations go on meanwhile.

    Returns:
        ``rank``, ``process``, ``host``; ``monotonic_ns`` and ``time_ns``, both clocks at this moment; and
        ``groups``, each with its ``name``, ``backend``, ``rank``, ``global_ranks``, ``stats`` and
        ``operations``. An operation has a ``state``: ``pending``, ``done`` or ``failed``; ``began_ns`` and
        ``ended_ns`` count on the monotonic clock. ``site`` is the source line that issued it, where that is
        known: of collectives that ``host`` carries out in the background, or waits in for long. Of ``nccl``
        an operation ends when its group looks, which is at the next operation or within 0.1 s.

    Example:
        With 2 ranks::

            group = collectives.new_group(backend="gloo")
            collectives.all_reduce(torch.ones(4), group=group)
            last = collectives.flight_record()["groups"][-1]["operations"][-1]
            last["name"], last["shape"], last["state"]  # 'all_reduce', [4], 'done'
    """
    return dump.snapshot("the program asked")


def dump_flight_record(path: str | Path | None = None) -> Path:
    """Writes the flight record of this process as JSON, for ``collectives trace``.

    Args:
        path: the file; ``None`` for what ``COLLECTIVES_FLIGHT_RECORD_FILE`` begins with, the rank and
            ``.json``. A file that is there is replaced as a whole.

    Returns:
        The path.

    Raises:
        ValueError: there is no path, neither here nor in the environment.
        OSError: the file cannot be written.
    """
    return dump.dump(path, "the program asked")


def prometheus_text() -> str:
    """Returns the counts of all groups of this process in the text format of Prometheus.

    Returns:
        Lines with what :meth:`ProcessGroup.stats` has, as ``collectives_operations_total``,
        ``collectives_bytes_total``, ``collectives_errors_total`` and ``collectives_seconds_total``, by group,
        backend, rank and operation.
    """
    return dump.prometheus_text()


@functools.cache
def _terminal() -> TextIO:
    """Opens the terminal once, so that what one stop has read ahead is there for the next."""
    return Path("/dev/stdin").open()


class Debugger(pdb.Pdb):
    """A debugger that reads the terminal, of which ``multiprocessing`` deprives its children."""

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Talks to the user; also where stepping stops."""
        before = sys.stdin
        sys.stdin = _terminal()
        try:
            super().interaction(*args, **kwargs)
        finally:
            sys.stdin = before

    def stop_at(self, frame: FrameType) -> None:
        """Talks to the user in ``frame``, and returns when the user lets the program go on.

        Raises:
            bdb.BdbQuit: the user quits.
        """
        self.reset()
        self.interaction(frame, None)
        if sys.version_info < (3, 13):
            # Keeps what the user assigned to local variables; newer frames do that by themselves.
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        if self.quitting:
            raise bdb.BdbQuit

    def follow(self, frame: FrameType) -> None:
        """Goes on stepping from ``frame`` where the user asked for that; the caller must return at once."""
        if self.stoplineno == -1 and not self.breaks:
            return
        if self.stoplineno != -1:
            self.set_next(frame)
        below: FrameType | None = frame
        while below is not None:
            below.f_trace = self.trace_dispatch
            self.botframe = below
            below = below.f_back
        sys.settrace(self.trace_dispatch)
