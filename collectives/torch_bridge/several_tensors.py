"""Operations on several tensors of this rank in one call, as torch's Gloo takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from collectives.core import operations, sparse
from collectives.core.arguments.staging import write
from collectives.core.arguments.validation import (
    check_outputs,
    check_same_dtype,
    check_tensor,
    fail,
    overload_arguments,
)
from collectives.core.operations import Operation
from collectives.core.process_group import ProcessGroup
from collectives.core.types import ReduceOp
from collectives.core.work import FinishingWork, Work
from collectives.errors import UnsupportedOperationError

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _all_reduce(group: ProcessGroup, tensors: Any, _: None, about: dict[str, Any]) -> Work:
    """Reduces all tensors of all ranks to one, which each of them then holds; they are all sparse, or none.

    The meaning of AVG and PREMUL_SUM would depend on the number of tensors.
    """
    reduction = ReduceOp.SUM if about["op"] is None else ReduceOp.of(about["op"])
    asynchronous = about.get("async_op", True)
    tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    if len(tensors) == 1:
        return sparse.allreduce(group, tensors[0], reduction, about["timeout"], asynchronous)
    layouts = {isinstance(tensor, torch.Tensor) and tensor.is_sparse for tensor in tensors}
    if True in layouts and (False in layouts or len({id(tensor) for tensor in tensors}) < len(tensors)):
        reason = "tensors of one call must be all sparse, or none, and must not share memory"
        fail(group, "all_reduce", reason)
    _check_alike(group, "all_reduce", tensors, dense=True not in layouts)
    combine = _COMBINE.get(reduction.name)
    if combine is None:
        reason = f"{reduction.name} takes one tensor in a call, but there are {len(tensors)}"
        fail(group, "all_reduce", reason, UnsupportedOperationError)
    if True in layouts:
        total = functools.reduce(torch.add, [tensor.detach() for tensor in tensors])
        work = sparse.allreduce(group, total, reduction, about["timeout"], asynchronous)

        def hand_out_sparse() -> None:
            for tensor in tensors:
                with torch.no_grad():
                    tensor.copy_(total)

        return FinishingWork(work, hand_out_sparse, tensors, asynchronous)
    check_outputs(group, "all_reduce", tensors)
    # As in the kernels: ranks add up accumulators, which are rounded once, where they are written.
    wide = _accumulator(tensors[0].dtype)
    total = functools.reduce(combine, [tensor.detach().to(wide) for tensor in tensors])
    return FinishingWork(
        group.call(operations.ALL_REDUCE, total, **about),
        partial(_hand_out, tensors, total),
        tensors,
        asynchronous,
    )


def _hand_out(tensors: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor is not values:
            write(tensor, values)


def _broadcast(group: ProcessGroup, tensors: Any, _: None, about: dict[str, Any]) -> Work:
    """Copies one of the root's tensors to all tensors of all ranks."""
    _check_alike(group, "broadcast", tensors)
    check_outputs(group, "broadcast", tensors)
    place = about.pop("root_tensor", 0)
    if not 0 <= place < len(tensors):
        fail(group, "broadcast", f"rootTensor is {place}, but there are {len(tensors)} tensors")
    work = group.call(operations.BROADCAST, tensors[place], **about)
    return FinishingWork(
        work, partial(_hand_out, tensors, tensors[place]), tensors, about.get("async_op", True)
    )


def _all_gather(group: ProcessGroup, output_tensors: Any, input_tensors: Any, about: dict[str, Any]) -> Work:
    """Gathers all tensors of all ranks, by ranks, in each of as many lists as there are inputs."""
    wanted = len(input_tensors) * group.size()
    if len(output_tensors) != len(input_tensors) or any(len(entry) != wanted for entry in output_tensors):
        reason = (
            f"output needs {len(input_tensors)} lists of {wanted} tensors, as there are {len(input_tensors)} "
            f"inputs and {group.size()} ranks"
        )
        fail(group, "all_gather", reason)
    flat = [tensor for entry in output_tensors for tensor in entry]
    _check_alike(group, "all_gather", [*input_tensors, *flat])
    check_outputs(group, "all_gather", flat)
    mine = torch.stack([tensor.detach() for tensor in input_tensors])
    gathered = mine.new_empty((wanted, *mine.shape[1:]))

    def hand_out() -> None:
        for entry in output_tensors:
            for tensor, values in zip(entry, gathered, strict=True):
                write(tensor, values)

    work = group.call(operations.ALL_GATHER_INTO_TENSOR, gathered, mine, **about)
    results = [list(entry) for entry in output_tensors]
    return FinishingWork(work, hand_out, flat, about.get("async_op", True), results)


def _check_alike(
    group: ProcessGroup, operation: str, tensors: Sequence[torch.Tensor], *, dense: bool = True
) -> None:
    """Checks that the tensors have one shape and data type."""
    for place, tensor in enumerate(tensors):
        if dense:
            check_tensor(group, operation, tensor, f"tensors[{place}]")
        if tensor.shape != tensors[0].shape:
            reason = (
                f"tensors of one call must have one shape, but entry 0 has {list(tensors[0].shape)} and "
                f"entry {place} {list(tensor.shape)}"
            )
            fail(group, operation, reason)
    check_same_dtype(group, operation, tensors, "tensors of one call")


_METHODS: dict[Operation, tuple[int, tuple[str, ...], Callable[..., Work]]] = {
    operations.ALL_REDUCE: (0, ("tensors", "tensor"), _all_reduce),
    operations.BROADCAST: (0, ("tensors", "tensor"), _broadcast),
    operations.ALL_GATHER: (1, ("input_tensors", "input_tensor"), _all_gather),
}
"""Collectives that take several tensors: where these stand, and what carries them out."""


class _Overloads:
    """Stands for a group whose method takes its arguments apart, and issues nothing."""

    @staticmethod
    def _overloaded(
        operation: Operation, outputs: Any, inputs: Any, opts: Any, timeout: Any = None, **about: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        return outputs, inputs, overload_arguments(operation, opts, timeout=timeout, **about)


def taken_apart(
    operation: Operation, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns outputs, inputs and the rest, by name, of the arguments of a group's method."""
    method: Any = getattr(ProcessGroup, operation.methods[0])
    apart: tuple[Any, Any, dict[str, Any]] = method(_Overloads, *args, **named)
    return apart


def method_for(
    group: ProcessGroup, operation: Operation, args: Sequence[Any], named: Mapping[str, Any]
) -> Callable[..., Work] | None:
    """Returns what carries out a collective of several tensors of this rank, or of a sparse one.

    It takes the arguments of the group's method. ``None`` where that one carries the collective out.

    Args:
        group: the group.
        operation: the collective.
        args: positional arguments of the method of ``torch.distributed.ProcessGroup``.
        named: keyword arguments, likewise.
    """
    if operation not in _METHODS:
        return None
    place, names, method = _METHODS[operation]
    given = args[place] if place < len(args) else next((named[one] for one in names if one in named), None)
    several = isinstance(given, (list, tuple)) and len(given) > 1
    one = given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given
    is_sparse = operation is operations.ALL_REDUCE and isinstance(one, torch.Tensor) and one.is_sparse
    if not (several or is_sparse):
        return None
    return lambda *args, **named: method(group, *taken_apart(operation, args, named))
