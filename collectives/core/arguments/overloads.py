"""The forms in which ``torch.distributed.ProcessGroup`` takes arguments: with an option record and without.

A method has an option record, such as :class:`~collectives.core.types.AllreduceOptions`, as its first
optional argument. Its overloads without one give a part of the record there, and the rest behind it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from collectives.core.types import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceScatterOptions,
    ScatterOptions,
)

__all__ = ["first_given", "inner_list", "with_limit", "with_reduction", "with_root"]

_Reduction = TypeVar("_Reduction", AllreduceOptions, ReduceScatterOptions)
_Rooted = TypeVar("_Rooted", BroadcastOptions, GatherOptions, ScatterOptions)
_Limited = TypeVar("_Limited", AllgatherOptions, AllToAllOptions, BarrierOptions)

_UNSET_TIMEOUT = timedelta(milliseconds=-1)
"""What the records of ``torch.distributed`` hold where the user names no limit."""


def with_reduction(
    record: type[_Reduction], opts: Any, op: ReduceOp | None, timeout: timedelta | None
) -> _Reduction:
    """Returns the record given, or one of the given kind from a record of another or from the form without.

    Args:
        record: the kind.
        opts: a record that has a reduction, the reduction itself, or ``None``; a record of the kind is
            returned as it is.
        op: the reduction where ``opts`` is ``None``; ``None`` for the sum.
        timeout: time limit, for the form without a record.

    Raises:
        TypeError: what stands for the reduction is none.
    """
    if type(opts) is record:
        return opts
    if opts is not None and hasattr(opts, "reduceOp"):
        timeout = None if opts.timeout == _UNSET_TIMEOUT else opts.timeout
        return record(timeout, opts.asyncOp, ReduceOp.of(opts.reduceOp))
    return record(timeout=timeout, reduceOp=ReduceOp.of(first_given(opts, op, ReduceOp.SUM)))


def with_limit(
    record: type[_Limited], opts: _Limited | timedelta | None, timeout: timedelta | None
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


def with_root(
    record: type[_Rooted], opts: _Rooted | int | None, root: int | None, timeout: timedelta | None
) -> _Rooted:
    """Returns the record given, or one of the given kind with a root, which nobody has checked.

    Args:
        record: the kind.
        opts: a record, the root itself, or ``None``.
        root: the root where ``opts`` is ``None``; ``None`` for rank 0.
        timeout: time limit, for the form without a record.
    """
    if isinstance(opts, record):
        return opts
    return record(timeout=timeout, rootRank=first_given(opts, root, 0))


def first_given(*values: Any) -> Any:
    """Returns the first of the values that is not ``None``; the last one never is."""
    return next(value for value in values if value is not None)


def inner_list(tensors: Any) -> Any:
    """Returns the list in a list of one list, as torch wraps them; anything else as it is."""
    if isinstance(tensors, (list, tuple)) and len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return tensors[0]
    return tensors
