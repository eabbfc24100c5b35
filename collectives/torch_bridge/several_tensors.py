"""All-reduce of several tensors of this rank in one call, as torch's Gloo takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from collectives.core.arguments.staging import write
from collectives.core.arguments.validation import check_outputs, check_same_dtype, check_tensor, fail
from collectives.core.process_group import ProcessGroup
from collectives.core.types import AllreduceOptions
from collectives.core.work import FinishingWork, Work
from collectives.errors import UnsupportedOperationError

__all__ = ["allreduce"]

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def allreduce(group: ProcessGroup, tensors: Sequence[torch.Tensor], options: AllreduceOptions) -> Work:
    """Reduces all tensors of all ranks to one, which each of them then holds.

    Args:
        group: the group.
        tensors: two or more dense tensors of one shape and data type, the same on every rank.
        options: the record of the all-reduce.

    Returns:
        Work whose result is the tensors.

    Raises:
        ValueError: the tensors differ in shape or data type, or share memory.
        UnsupportedOperationError: AVG and PREMUL_SUM, whose meaning would depend on the number of tensors.
    """
    combine = _COMBINE.get(options.reduceOp.name)
    for place, tensor in enumerate(tensors):
        check_tensor(group, "all_reduce", tensor, f"tensors[{place}]")
        if tensor.shape != tensors[0].shape:
            fail(
                group,
                "all_reduce",
                f"tensors of one call must have one shape, but entry 0 has {list(tensors[0].shape)} and "
                f"entry {place} {list(tensor.shape)}",
            )
    check_same_dtype(group, "all_reduce", tensors, "tensors of one call")
    check_outputs(group, "all_reduce", tensors)
    if combine is None:
        fail(
            group,
            "all_reduce",
            f"{options.reduceOp.name} takes one tensor in a call, but there are {len(tensors)}",
            UnsupportedOperationError,
        )
    # As in the kernels: ranks add up accumulators, which are rounded once, where they are written.
    wide = _accumulator(tensors[0].dtype)
    total = functools.reduce(combine, [tensor.detach().to(wide) for tensor in tensors])

    def hand_out() -> None:
        for tensor in tensors:
            write(tensor, total)

    return FinishingWork(group.allreduce([total], options), hand_out, tensors, options.asyncOp)
