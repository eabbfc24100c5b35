"""Reduction operations and the option records of the operations.

Field names of the records are those of ``torch.distributed`` (``reduceOp``, ``rootRank``, ``asyncOp``). Ranks
in a record count within the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, NewType, TypeAlias

import torch
import torch.distributed as _torch_distributed

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "GroupName",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "default_pg_timeout",
    "make_premul_sum",
]

GroupName = NewType("GroupName", str)
"""The name of a group, for annotations."""

default_pg_timeout = timedelta(minutes=30)
"""Time limit of an operation where the user names none (every backend but NCCL)."""


def nanoseconds(limit: timedelta) -> int:
    """Returns a time limit as the core counts it.

    Args:
        limit: the limit; what is below a microsecond of it does not count.

    Returns:
        Nanoseconds.
    """
    return limit // timedelta(microseconds=1) * 1000


class ReduceOp:
    """A reduction: ``ReduceOp.SUM``, ``AVG``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR``, ``BXOR``.

    ``PREMUL_SUM`` multiplies every input by a factor and sums; make one with :func:`make_premul_sum`. AVG is
    the sum over the number of ranks. Enum-like; ``RedOpType`` is another name of the class. Compares equal to
    the operation of the same name in ``torch.distributed``; :meth:`of` turns one into ours.

    Args:
        op: its name, its number, or a reduction, ours or of ``torch.distributed``.
        factor: multiplier of ``PREMUL_SUM``; ``None`` for that of ``op``.

    Attributes:
        name: ``"SUM"``, ...
        code: number of the operation, the same as in ``torch.distributed``.
        factor: multiplier of ``PREMUL_SUM``; ``None`` for every other operation.

    Raises:
        ValueError: there is no reduction of this name or number.
        TypeError: ``op`` is something else.
    """

    __slots__ = ("code", "factor", "name")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]
    RedOpType: TypeAlias = "ReduceOp"  # the class itself, from below
    __members__: ClassVar[Mapping[str, ReduceOp]]

    name: str
    code: int
    factor: float | None

    def __init__(self, op: object, factor: float | None = None) -> None:
        if not isinstance(op, (str, int)):
            known = ReduceOp.of(op)
            op, factor = known.name, known.factor if factor is None else factor
        name = next((name for name, code in _CODES.items() if op in (name, code)), None)
        if name is None:
            raise ValueError(f"unknown reduction {op!r}; the reductions are {', '.join(_CODES)}")
        self.name = name
        self.code = _CODES[name]
        self.factor = factor

    @property
    def value(self) -> int:
        """:attr:`code`, under the name that enums have for it."""
        return self.code

    @classmethod
    def of(cls, op: object) -> ReduceOp:
        """Returns a reduction as one of ours.

        Args:
            op: one of ours, which is returned as it is, or of ``torch.distributed``.

        Raises:
            TypeError: ``op`` is neither.
        """
        if type(op) is cls:
            return op
        if isinstance(op, _torch_distributed.ReduceOp.RedOpType):
            return _OF_TORCH[op]
        if isinstance(op, _torch_distributed.ReduceOp):
            kind: Any = op.op  # type: ignore[attr-defined]
            if kind == _PREMUL_SUM and (factor := op.__getstate__()[1]) is not None:  # type: ignore[attr-defined]
                return make_premul_sum(factor)
            return _OF_TORCH[kind]
        raise TypeError(
            f"op must be a ReduceOp, such as ReduceOp.SUM, but is {op!r} of type {type(op).__name__}"
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ReduceOp):
            return self.code == other.code and self.factor == other.factor
        if isinstance(other, (_torch_distributed.ReduceOp, _torch_distributed.ReduceOp.RedOpType)):
            return self == ReduceOp.of(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.code, self.factor))

    def __int__(self) -> int:
        return self.code

    def __repr__(self) -> str:
        return f"<ReduceOp.{self.name}{'' if self.factor is None else f'({self.factor})'}: {self.code}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.name, self.factor)


_CODES = {
    "SUM": 0, "AVG": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4, "BAND": 5, "BOR": 6, "BXOR": 7, "PREMUL_SUM": 8,
}  # fmt: skip
_BY_NAME = {name: ReduceOp(name) for name in _CODES}
_OF_TORCH: dict[Any, ReduceOp] = {
    getattr(_torch_distributed.ReduceOp.RedOpType, name): op for name, op in _BY_NAME.items()
}
_PREMUL_SUM: Any = getattr(_torch_distributed.ReduceOp.RedOpType, "PREMUL_SUM")  # noqa: B009 - for stubs
for _name, _op in _BY_NAME.items():
    setattr(ReduceOp, _name, _op)
setattr(ReduceOp, "RedOpType", ReduceOp)  # noqa: B010 - a name of a type, for type checkers
ReduceOp.__members__ = MappingProxyType(_BY_NAME)


def make_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """Returns the reduction ``sum over ranks of factor * input``.

    Args:
        factor: a number, or a tensor of one element, which is read at once.

    Raises:
        ValueError: the tensor has more elements, or none.

    Example:
        With 2 ranks::

            tensor = torch.tensor([1.0, 2.0])
            collectives.all_reduce(tensor, collectives.make_premul_sum(0.5))  # [1.0, 2.0] on both
    """
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise ValueError(
            f"the factor of PREMUL_SUM must be one number, but the tensor has shape {list(factor.shape)}"
        )
    return ReduceOp("PREMUL_SUM", float(factor))


@dataclass(slots=True)
class Options:
    """What every record carries."""

    timeout: timedelta | None = None
    """Time limit of this operation; ``None`` takes the group's."""
    asyncOp: bool = True
    """Whether the caller goes on before it is done; ``False`` lets a group use the caller's thread or stream.

    The Work is to be waited for all the same: a group that has no use for them, such as gloo, returns it
    pending.
    """


@dataclass(slots=True)
class AllreduceOptions(Options):
    """Options of ``allreduce``."""

    reduceOp: ReduceOp = field(default=ReduceOp.SUM)
    """The reduction."""


@dataclass(slots=True)
class AllreduceCoalescedOptions(AllreduceOptions):
    """Options of ``allreduce_coalesced``."""


@dataclass(slots=True)
class ReduceOptions(Options):
    """Options of ``reduce``."""

    reduceOp: ReduceOp = field(default=ReduceOp.SUM)
    """The reduction."""
    rootRank: int = 0
    """The root, counted within the group."""
    rootTensor: int = 0
    """Which of the root's tensors; a process has one, so 0."""


@dataclass(slots=True)
class ReduceScatterOptions(Options):
    """Options of ``reduce_scatter`` and its single-tensor form."""

    reduceOp: ReduceOp = field(default=ReduceOp.SUM)
    """The reduction."""


@dataclass(slots=True)
class BroadcastOptions(Options):
    """Options of ``broadcast``."""

    rootRank: int = 0
    """The root, counted within the group."""
    rootTensor: int = 0
    """Which of the root's tensors; a process has one, so 0."""


@dataclass(slots=True)
class GatherOptions(Options):
    """Options of ``gather``."""

    rootRank: int = 0
    """The root, counted within the group."""


@dataclass(slots=True)
class ScatterOptions(Options):
    """Options of ``scatter``."""

    rootRank: int = 0
    """The root, counted within the group."""


@dataclass(slots=True)
class AllgatherOptions(Options):
    """Options of ``allgather`` and its single-tensor form."""


@dataclass(slots=True)
class AllToAllOptions(Options):
    """Options of ``alltoall`` and its single-tensor form."""


@dataclass(slots=True)
class BarrierOptions(Options):
    """Options of ``barrier``."""

    device_ids: list[int] = field(default_factory=list)
    """Number of the accelerator's device, as a list of one; empty for the current one."""
    device: torch.device | None = None
    """The device itself."""
