"""Time limits as users give them; every function that takes one checks it here."""

from __future__ import annotations

import time
from datetime import timedelta

LONGEST = timedelta(days=36500)
"""What counts for any longer one: nanoseconds of it fit in 64 bits, and clocks can be added to it."""

_NONE = timedelta(0)
_SHORTEST_S = 1e-3


def left_until(end: float) -> timedelta:
    """Returns what is left of a time limit; at least a millisecond, since zero may stand for no limit.

    Args:
        end: when it is over, by ``time.monotonic()``.
    """
    return timedelta(seconds=max(_SHORTEST_S, end - time.monotonic()))


def time_limit(timeout: object, *, positive: bool = True) -> timedelta:
    """Returns a time limit that was given, at most :data:`LONGEST`.

    Args:
        timeout: what was given.
        positive: whether zero and less are refused.

    Raises:
        TypeError: it is no ``timedelta``; numbers are not taken, as ``torch.distributed`` does not take them.
        ValueError: it is not positive.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout must be a datetime.timedelta, but is {timeout!r} of type {type(timeout).__name__}"
        )
    if positive and timeout <= _NONE:
        raise ValueError(f"timeout must be positive, but is {timeout.total_seconds():g} s")
    return min(timeout, LONGEST)


def seconds_to_wait(timeout: object) -> float:
    """Returns the seconds for which a ``Work.wait(timeout)`` may block; 0 for no limit of its own.

    ``None`` and zero stand for no limit. Of a limit that has passed already, this is the shortest wait.

    Raises:
        TypeError: it is neither ``None`` nor a ``timedelta``.
    """
    if timeout is None:
        return 0.0
    seconds = time_limit(timeout, positive=False).total_seconds()
    return max(_SHORTEST_S, seconds) if seconds else 0.0
