"""Averages tensors over a group, by whatever reduction the group offers for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from collectives import ProcessGroup, ReduceOp, UnsupportedOperationError, Work
from collectives.core.operations import ALL_REDUCE, ALL_REDUCE_COALESCED
from collectives.core.work import CoalescedWork, FinishingWork

__all__ = ["Averager", "average", "averaging_op", "launches"]


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


def launches(group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether each operation is a launch on a device, which costs more than copying a gradient."""
    return device.type != "cpu" or group.is_stream_ordered(device)


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

        Takes the group's fast path where there is one, which checks no arguments in Python. Where operations
        are launches, there is one for all tensors.

        Args:
            tensors: at least one; floating, of the same sizes and data types in the same order on every rank,
                on one device.
        """
        if len(tensors) > 1 and launches(self.group, tensors[0].device):
            return self._start_together(tensors)
        works = [self._start_one(tensor) for tensor in tensors]
        return works[0] if len(works) == 1 else CoalescedWork(works)

    def _op(self, tensor: torch.Tensor) -> ReduceOp:
        return self.op_for(tensor.dtype, tensor.device) if self.divisor is None else ReduceOp.SUM

    def _start_one(self, tensor: torch.Tensor) -> Work:
        op = self._op(tensor)
        work = self.group.fast_collective(ALL_REDUCE.opcode, tensor, None, op.code, async_op=True)
        if work is None:
            work = self.group.call(ALL_REDUCE, tensor, op=op)
        return self._divided(work, op, [tensor])

    def _start_together(self, tensors: Sequence[torch.Tensor]) -> Work:
        by_op: dict[ReduceOp, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_op.setdefault(self._op(tensor), []).append(tensor)
        works = [
            self._divided(self.group.call(ALL_REDUCE_COALESCED, some, op=op), op, some)
            for op, some in by_op.items()
        ]
        return works[0] if len(works) == 1 else CoalescedWork(works)

    def _divided(self, work: Work, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> Work:
        """Returns the Work of a reduction that ends in means."""
        if op == ReduceOp.AVG:
            return work
        divide = partial(_divide, tensors, self.divisor or self.group.size())
        return FinishingWork(work, divide, list(tensors), async_op=False)


def _divide(tensors: Sequence[torch.Tensor], divisor: int) -> None:
    with torch.no_grad():
        torch._foreach_div_(list(tensors), divisor)
