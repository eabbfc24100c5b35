"""What a forked child inherits of its parent's groups and stores, and how each of them learns of the fork.

Of a process with groups, a child that :func:`os.fork` makes (as a ``DataLoader`` with workers does) has the
memory and the connections, but none of the threads. It must neither use nor end them: its parent goes on with
both. So each is told in the child before other code runs there; the parent's operations pay nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["left_to_parent", "tell_in_children"]

_T = TypeVar("_T")

_living: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def tell_in_children(thing: _T, tell: Callable[[_T], object]) -> None:
    """Has a thing told in every child that this process or a child of it forks, as long as it lives.

    Args:
        thing: what is told; it is not kept alive.
        tell: called with it in the child, where it must not wait. An error keeps no other thing from being
            told, and goes to :data:`sys.unraisablehook`, which prints it. Must not refer to the thing.
    """
    _living[thing] = tell


def left_to_parent(what: str) -> str:
    """Returns what to say of something that a child has no part in."""
    return f"{what} belongs to the parent of this forked process; make a new one in the child"


def _tell(things: Iterator[tuple[Any, Callable[[Any], object]]]) -> None:
    try:
        for thing, tell in things:
            tell(thing)
    except BaseException:
        _tell(things)  # the rest; errors of theirs get this one as their context
        raise


os.register_at_fork(after_in_child=lambda: _tell(iter(list(_living.items()))))
