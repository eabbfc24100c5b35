"""Option records of ``torch.distributed``, and the bases of backends' own."""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from datetime import timedelta
from typing import Any, ClassVar

from torch._C import _distributed_c10d as c10d

from collectives.core.types import Options, ReduceOp

_NONE = timedelta(0)


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


REDUCE_OP_CODES = {
    hash(c10d.ReduceOp(getattr(c10d.ReduceOp, name))): op.code
    for name, op in ReduceOp.__members__.items()
    if name != "PREMUL_SUM"
}
"""Codes of the reductions without a factor, by the hash of a ``torch.distributed.ReduceOp``."""


def time_limit_of(opts: Any) -> timedelta | None:
    """Returns the time limit of a record; ``None`` where one of torch's has zero or less, as for "none"."""
    timeout: timedelta | None = opts.timeout
    return timeout if isinstance(opts, Options) or (timeout is not None and timeout > _NONE) else None
