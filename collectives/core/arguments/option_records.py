"""Option records of ``torch.distributed`` converted to those of :mod:`collectives.core.types`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields
from datetime import timedelta
from typing import Any, ClassVar

from torch._C import _distributed_c10d as c10d

from collectives.core import types as ours
from collectives.errors import UnsupportedOperationError

__all__ = [
    "REDUCE_OP_CODES",
    "BackendOptions",
    "GeneralOptions",
    "is_general",
    "limit",
    "record",
    "reduce_op_code",
    "reduction",
]

_NONE = timedelta(0)
_REDUCTIONS: dict[Any, ours.ReduceOp] = {
    getattr(c10d.ReduceOp, name): getattr(ours.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


class GeneralOptions(c10d.Backend.Options):
    """torch's record of no backend in particular, which ``torch.distributed.split_group`` copies."""

    def __deepcopy__(self, memo: object) -> GeneralOptions:
        copied = GeneralOptions(self.backend, self._timeout)
        copied.group_name = self.group_name
        return copied


class BackendOptions(c10d.Backend.Options):
    """Base of the records of a backend's own options, which are dataclasses.

    ``torch.distributed`` looks for the class of torch, as in the overrides of a device mesh.
    """

    __slots__ = ()

    _backend: ClassVar[str]
    _timeout = None  # type: ignore[assignment]  # a record says nothing of it, so that torch takes its default

    def __post_init__(self) -> None:
        super().__init__(self._backend)

    def __copy__(self) -> BackendOptions:
        return type(self)(*self._values())

    def __deepcopy__(self, memo: object) -> BackendOptions:
        return copy(self)  # records within it may be torch's, which have no copies

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))  # type: ignore[arg-type]


def is_general(options: object) -> bool:
    """Returns whether options are torch's record of no backend in particular."""
    return type(options) in (c10d.Backend.Options, GeneralOptions)


def limit(timeout: timedelta | None) -> timedelta | None:
    """Returns a time limit; ``None`` where torch says "none given" with zero or a negative time."""
    return timeout if timeout is not None and timeout > _NONE else None


def reduction(op: Any) -> ours.ReduceOp:
    """Returns torch's reduction as ours, ``PREMUL_SUM`` with its factor.

    Args:
        op: a ``torch.distributed.ReduceOp``, a member of its enum, or one of ours.

    Raises:
        TypeError: it is none of them.
    """
    if type(op) is c10d.ReduceOp:
        plain = _REDUCTIONS.get(op.op)  # type: ignore[attr-defined]
        if plain is not None:
            return plain
    return ours.ReduceOp.of(op)


REDUCE_OP_CODES = {hash(c10d.ReduceOp(kind)): op.code for kind, op in _REDUCTIONS.items()}
"""Codes of the reductions without a factor, by the hash of a ``torch.distributed.ReduceOp``."""


def reduce_op_code(op: Any) -> int | None:
    """Returns the code of a reduction in a record; ``None`` for ``PREMUL_SUM``, which has a factor.

    Args:
        op: a ``torch.distributed.ReduceOp``, whose hash tells its kind in one call.
    """
    return REDUCE_OP_CODES.get(hash(op))


def _barrier(opts: Any) -> ours.BarrierOptions:
    return ours.BarrierOptions(limit(opts.timeout), opts.asyncOp, list(opts.device_ids or ()), opts.device)


def _allreduce(opts: Any) -> ours.AllreduceOptions:
    if getattr(opts, "sparseIndices", None) is not None:
        raise UnsupportedOperationError(
            "all_reduce: sparseIndices of the option record are not taken; give the sparse tensor itself"
        )
    return ours.AllreduceOptions(limit(opts.timeout), opts.asyncOp, reduction(opts.reduceOp))


_RECORDS: dict[type, Callable[[Any], Any]] = {
    c10d.AllreduceOptions: _allreduce,
    c10d.AllreduceCoalescedOptions: _allreduce,
    c10d.BarrierOptions: _barrier,
    c10d.BroadcastOptions: lambda o: ours.BroadcastOptions(
        limit(o.timeout), o.asyncOp, o.rootRank, o.rootTensor
    ),
    c10d.ReduceOptions: lambda o: ours.ReduceOptions(
        limit(o.timeout), o.asyncOp, reduction(o.reduceOp), o.rootRank, o.rootTensor
    ),
    c10d.ReduceScatterOptions: lambda o: ours.ReduceScatterOptions(
        limit(o.timeout), o.asyncOp, reduction(o.reduceOp)
    ),
    c10d.AllgatherOptions: lambda o: ours.AllgatherOptions(limit(o.timeout), o.asyncOp),
    c10d.AllToAllOptions: lambda o: ours.AllToAllOptions(limit(o.timeout), o.asyncOp),
    c10d.GatherOptions: lambda o: ours.GatherOptions(limit(o.timeout), o.asyncOp, o.rootRank),
    c10d.ScatterOptions: lambda o: ours.ScatterOptions(limit(o.timeout), o.asyncOp, o.rootRank),
}


def record(opts: Any) -> Any:
    """Returns torch's option record as ours; anything else, such as a root or a reduction, as it is."""
    convert = _RECORDS.get(type(opts))
    return opts if convert is None else convert(opts)
