"""What a forked child inherits of the groups of its parent, and must leave alone.

Of a process with groups, a child that :func:`os.fork` makes (as a ``DataLoader`` with workers does) has the
memory and the connections, but none of the threads. It must neither use nor end them: its parent goes on with
both. So every group is told in the child before other code runs there; the parent's operations pay nothing.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Inherited", "left_to_parent", "tell_in_children"]


class Inherited(Protocol):
    """What is told in a child."""

    def _leave_to_parent(self) -> None:
        """Called in the child."""


_living: weakref.WeakSet[Inherited] = weakref.WeakSet()


def tell_in_children(thing: Inherited) -> None:
    """Has a thing told in every child that this process or a child of it forks, as long as it lives."""
    _living.add(thing)


def left_to_parent(what: str) -> str:
    """Returns what to say of something that a child has no part in."""
    return f"{what} belongs to the parent of this forked process; make a new one in the child"


def _in_child() -> None:
    for thing in list(_living):
        thing._leave_to_parent()


os.register_at_fork(after_in_child=_in_child)
