"""The forms in which ``torch.distributed.ProcessGroup`` takes arguments: with an option record and without.

A method has an option record, torch's or ours, such as :class:`~collectives.core.types.AllreduceOptions`, as
its first optional argument. Its overloads without one give a part of the record there, and the rest after it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from collectives.core.arguments.option_records import record
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


def with_reduction(
    kind: type[_Reduction], opts: Any, op: ReduceOp | None, timeout: timedelta | None
) -> _Reduction:
    """Returns the options of a method whose overloads have a record or a reduction.

    Args:
        kind: the class of record to return.
        opts: a record that has a reduction, the reduction itself, or ``None``; a record of the class is
            returned as it is.
        op: the reduction where ``opts`` is ``None``; ``None`` for the sum.
        timeout: time limit, for the form without a record.

    Raises:
        TypeError: what stands for the reduction is none.
    """
    if type(opts) is kind:
        return opts
    if opts is not None:
        opts = record(opts)
        if hasattr(opts, "reduceOp"):
            return kind(opts.timeout, opts.asyncOp, opts.reduceOp)
        op = opts
    return kind(timeout=timeout) if op is None else kind(timeout=timeout, reduceOp=ReduceOp.of(op))


def with_limit(kind: type[_Limited], opts: Any, timeout: timedelta | None) -> _Limited:
    """Returns the options of a method whose overloads have a record or a time limit, which is not checked.

    Args:
        kind: the class of record to return.
        opts: a record, the time limit itself, or ``None``.
        timeout: the limit where ``opts`` is ``None``; ``None`` for the group's.
    """
    opts = record(opts)
    return opts if isinstance(opts, kind) else kind(timeout if opts is None else opts)


def with_root(kind: type[_Rooted], opts: Any, root: int | None, timeout: timedelta | None) -> _Rooted:
    """Returns the options of a method whose overloads have a record or a root, which is not checked.

    Args:
        kind: the class of record to return.
        opts: a record, the root itself, or ``None``.
        root: the root where ``opts`` is ``None``; ``None`` for rank 0.
        timeout: time limit, for the form without a record.
    """
    opts = record(opts)
    return opts if isinstance(opts, kind) else kind(timeout=timeout, rootRank=first_given(opts, root, 0))


def first_given(*values: Any) -> Any:
    """Returns the first of the values that is not ``None``; the last one never is."""
    return next(value for value in values if value is not None)


def inner_list(tensors: Any) -> Any:
    """Returns the list in a list of one list, as torch wraps them; anything else as it is."""
    if isinstance(tensors, (list, tuple)) and len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return tensors[0]
    return tensors
