"""The forms in which ``torch.distributed.ProcessGroup`` takes arguments: with an option record and without.

A method has an option record, such as :class:`~collectives.types.AllreduceOptions`, as its first optional
argument. Its overloads without one give a part of the record there, and the rest behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from collectives.types import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceOp,
    ReduceScatterOptions,
)

__all__ = ["first_given", "inner_list", "with_limit", "with_reduction"]

_Reduction = TypeVar("_Reduction", AllreduceOptions, ReduceScatterOptions)
_Limited = TypeVar("_Limited", AllgatherOptions, AllToAllOptions, BarrierOptions)

_UNSET_TIMEOUT = timedelta(milliseconds=-1)
"""What the records of ``torch.distributed`` hold where the user names no limit."""


def with_reduction(
    record: Callable[..., _Reduction], opts: Any, op: ReduceOp | None, timeout: timedelta | None
) -> _Reduction:
    """Returns a record of the given kind, from a record of another kind or from the form without one.

    Args:
        record: the kind.
        opts: a record that has a reduction, the reduction itself, or ``None``.
        op: the reduction where ``opts`` is ``None``; ``None`` for the sum.
        timeout: time limit, for the form without a record.

    Raises:
        TypeError: what stands for the reduction is none.
    """
    if opts is not None and hasattr(opts, "reduceOp"):
        timeout = None if opts.timeout == _UNSET_TIMEOUT else opts.timeout
        return record(timeout, opts.asyncOp, ReduceOp.of(opts.reduceOp))
    return record(timeout=timeout, reduceOp=ReduceOp.of(first_given(opts, op, ReduceOp.SUM)))


def with_limit(
    record: Callable[..., _Limited], opts: _Limited | timedelta | None, timeout: timedelta | None
) -> _Limited:
    """Returns the record given, or one of the given kind with a time limit.

    Args:
        record: the kind.
        opts: a record, the time limit itself, or ``None``.
        timeout: the limit where ``opts`` is ``None``; ``None`` for the group's.
    """
    if opts is None or isinstance(opts, timedelta):
        return record(timeout if opts is None else opts)
    return opts


def first_given(*values: Any) -> Any:
    """Returns the first of the values that is not ``None``; the last one never is."""
    return next(value for value in values if value is not None)


def inner_list(tensors: Any) -> Any:
    """Returns the list in a list of one list, as torch wraps them; anything else as it is."""
    if isinstance(tensors, (list, tuple)) and len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return tensors[0]
    return tensors
