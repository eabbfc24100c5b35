"""The mean of a tensor over a group, by whatever reduction the group offers for it."""

from __future__ import annotations

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, UnsupportedOperationError, Work
from collectives.work import FinishingWork

__all__ = ["average", "averaging_op"]

_AVERAGE = AllreduceOptions(reduceOp=ReduceOp.AVG)
_SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)


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
    wire = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if averaging_op(group, wire.dtype, wire.device) == ReduceOp.AVG:
        return group.allreduce([wire], _AVERAGE)
    size = group.size()
    return FinishingWork(group.allreduce([wire], _SUM), lambda: _divide(wire, size), [tensor])


def _divide(tensor: torch.Tensor, divisor: int) -> None:
    with torch.no_grad():
        tensor.div_(divisor)
