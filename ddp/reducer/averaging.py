"""Averages tensors over a group, by whatever reduction the group offers for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, UnsupportedOperationError, Work
from collectives.core.opcodes import ALL_REDUCE
from collectives.core.work import CoalescedWork, FinishingWork

__all__ = ["Averager", "average", "averaging_op"]


def averaging_op(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> ReduceOp:
    """Returns the reduction of :func:`average`: AVG where the group offers it (one rounding), else SUM.

    Raises:
        UnsupportedOperationError: the group can do neither.
    """
    dtype = dtype.to_real() if dtype.is_complex else dtype
    for op in (ReduceOp.AVG, ReduceOp.SUM):
        if group.supports("all_reduce", device=device.type, dtype=dtype, op=op):
            return op
    reason = group.capabilities.why_not("all_reduce", device=device.type, dtype=dtype, op=ReduceOp.SUM)
    raise UnsupportedOperationError(
        f"[rank {group.rank()}] gradients of {dtype} on {device.type} cannot be averaged over "
        f"{group.describe()}: {reason}"
    )


def average(group: ProcessGroup, tensor: torch.Tensor) -> Work:
    """Averages a tensor over all ranks, in place, complex numbers as pairs of real ones; does not block.

    Args:
        group: the ranks.
        tensor: floating or complex tensor of the same shape and data type on every rank.
    """
    return Averager(group).start([torch.view_as_real(tensor) if tensor.is_complex() else tensor])


class Averager:
    """Averages over one group, again and again.

    Attributes:
        group: the ranks.
        divisor: what sums are divided by; ``None`` for the number of ranks, which makes them means.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.divisor: int | None = None
        self._ops: dict[tuple[torch.dtype, torch.device], ReduceOp] = {}

    def op_for(self, dtype: torch.dtype, device: torch.device) -> ReduceOp:
        """Returns the reduction for a data type; raises as :func:`averaging_op`."""
        key = (dtype, device)
        op = self._ops.get(key)
        if op is None:
            op = self._ops[key] = averaging_op(self.group, dtype, device)
        return op

    def start(self, tensors: Sequence[torch.Tensor]) -> Work:
        """Averages tensors over all ranks, each in place; does not block. The Work is to be waited for.

        Takes the group's fast path where there is one, which checks no arguments in Python.

        Args:
            tensors: at least one; floating, of the same sizes and data types in the same order on every rank.
        """
        works: list[Work] = []
        for tensor in tensors:
            op = self.op_for(tensor.dtype, tensor.device) if self.divisor is None else ReduceOp.SUM
            work = self.group.fast_collective(ALL_REDUCE, tensor, None, op.code, async_op=True)
            if work is None:
                work = self.group.allreduce([tensor], AllreduceOptions(reduceOp=op))
            if op != ReduceOp.AVG:
                divide = partial(_divide, tensor, self.divisor or self.group.size())
                work = FinishingWork(work, divide, [tensor], async_op=False)
            works.append(work)
        return works[0] if len(works) == 1 else CoalescedWork(works)


def _divide(tensor: torch.Tensor, divisor: int) -> None:
    with torch.no_grad():
        tensor.div_(divisor)
