"""Debugging: how much to check and to say, and a breakpoint on one rank.

The environment is that of ``torch.distributed``: ``TORCH_DISTRIBUTED_DEBUG`` is ``OFF`` (default), ``INFO``
or ``DETAIL``; ``TORCH_CPP_LOG_LEVEL`` and the level together choose what the logger ``collectives`` lets
through; ``TORCH_SHOW_CPP_STACKTRACES=1`` logs the call stack where ranks call different operations.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
from collections import Counter
from datetime import timedelta
from types import FrameType

from collectives.api.world_state import default_group
from collectives.core.process_group import ProcessGroup
from collectives.core.types import BarrierOptions
from collectives.logs import Log

__all__ = ["DebugLevel", "breakpoint", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]

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
    """Returns ``group``; at level DETAIL inside a group that compares calls, also where it does so itself.

    What backends compare is what they need: not the shapes of tensors of one size.

    Args:
        group: the group.
        detail: whether the caller asks for the comparison, whatever the level is.
    """
    wanted = detail or get_debug_level() >= DebugLevel.DETAIL
    if not wanted or group.size() == 1:
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
        ValueError: the default group has no such rank.
        CollectiveTimeoutError: the debugger was left open for longer.
    """
    group = default_group()
    if not 0 <= rank < group.size():
        raise ValueError(
            f"[rank {group.rank()}] breakpoint: rank is {rank}, but the ranks of the default group are 0 to "
            f"{group.size() - 1}"
        )
    caller: FrameType = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno)
    _hits[place] += 1
    if _hits[place] <= skip:
        log.of(group).warning("breakpoint: call %d of %d to skip", _hits[place], skip)
        return
    limit = None if timeout_s is None else timedelta(seconds=timeout_s)
    if group.rank() != rank:
        group.barrier(BarrierOptions(limit, False)).wait()
        return
    from collectives.api.breakpoints import Debugger

    debugger = Debugger()
    debugger.message(f"[rank {rank}] breakpoint; the other ranks wait until 'continue'")
    debugger.stop_at(caller)
    group.barrier(BarrierOptions(limit, False)).wait()
    debugger.follow(caller)
