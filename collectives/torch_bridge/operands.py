"""Operands as torch hands them to a group: in lists of one, and before they are there."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["list_or_none", "only", "wait_for_async_tensors"]


def only(values: Any) -> Any:
    """Returns the entry of a list of one, as torch wraps tensors and lists; anything else as it is."""
    return values[0] if type(values) is list and len(values) == 1 else values


def list_or_none(values: Any) -> Any:
    """Returns the list in a list of one; ``None`` for none, as ranks that are not the root give."""
    entry = only(values)
    return None if type(entry) is list and not entry else entry


def wait_for_async_tensors(values: Any) -> tuple[Any, bool]:
    """Waits for what torch's functional collectives gave, and nobody waited for.

    An ``AsyncCollectiveTensor`` has no memory of its own. torch's operators wait for the tensor inside it and
    take that, but Python functions call a group of ours without going through an operator.

    Args:
        values: a tensor, or a list or tuple of values, at any depth; anything else comes back as it is.

    Returns:
        The values with the tensors inside, which share the memory that is seen through the outer ones, and
        whether there were any.
    """
    functional = sys.modules.get("torch.distributed._functional_collectives")  # slow to load, and rarely used
    return (values, False) if functional is None else _wait_for(values, functional.AsyncCollectiveTensor)


def _wait_for(values: Any, kind: type[Any]) -> tuple[Any, bool]:
    if isinstance(values, kind):
        return values.trigger_wait(), True
    if type(values) not in (list, tuple):
        return values, False
    entries = [_wait_for(value, kind) for value in values]
    if not any(found for _, found in entries):
        return values, False
    return type(values)(value for value, _ in entries), True
