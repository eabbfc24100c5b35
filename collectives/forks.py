"""Forked children: what they inherit of their parent's groups and stores, they must not use.

A child that :func:`os.fork` makes of a process with groups (a ``DataLoader`` with workers does) has its
memory and connections, but none of its threads. It must neither use nor end them, because its parent goes on
with both. So a function marks each group and store in the child before other code runs there; the parent's
operations pay nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")

_functions: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def call_in_forked_children(instance: _T, function: Callable[[_T], object]) -> None:
    """Has a function called in every child that this process or a child of it forks.

    Args:
        instance: the function's argument; it is not kept alive, and the function is not called without it.
        function: called in the child, where it must not wait. An error keeps no other function from being
            called, and goes to :data:`sys.unraisablehook`, which prints it. Must not refer to the instance.
    """
    _functions[instance] = function


def begin_anew_in_children(instance: Any) -> None:
    """Has an object initialised again in every forked child, where its threads do not exist.

    Args:
        instance: the object, which lives as long as the process; its class takes no arguments.
    """
    os.register_at_fork(after_in_child=instance.__init__)


def belongs_to_parent(what: str) -> str:
    """Returns the words of an error about what a forked child inherited."""
    return f"{what} belongs to the parent of this forked process; make a new one in the child"


def _call(functions: Iterator[tuple[Any, Callable[[Any], object]]]) -> None:
    try:
        for instance, function in functions:
            function(instance)
    except BaseException:
        _call(functions)  # the rest; errors of theirs get this one as their context
        raise


os.register_at_fork(after_in_child=lambda: _call(iter(list(_functions.items()))))
