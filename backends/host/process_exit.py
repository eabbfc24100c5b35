"""The end of groups that nobody destroyed, when their process ends."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

from collectives.backends._shared.exit_reasons import exception_behind

__all__ = ["end_at_exit"]


_live: weakref.WeakSet[Any] = weakref.WeakSet()


def end_at_exit(group: Any) -> None:
    """Ends a group with the process, unless it has gone before.

    Other ranks hear of an exception that ended the program.

    Args:
        group: a group of ``host``.
    """
    _live.add(group)


@atexit.register
def _end_all() -> None:
    for group in list(_live):
        with contextlib.suppress(Exception):
            group.abort() if exception_behind() else group._native.shutdown(False)
