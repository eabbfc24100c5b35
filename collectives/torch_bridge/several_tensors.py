"""Operations on several tensors of this rank in one call, as torch's Gloo takes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from collectives.core import sparse
from collectives.core.arguments.calls import overload_arguments
from collectives.core.arguments.option_records import reduction
from collectives.core.arguments.staging import write
from collectives.core.arguments.validation import check_outputs, check_same_dtype, check_tensor, fail
from collectives.core.operations import ALL_GATHER, ALL_REDUCE, BROADCAST, Operation
from collectives.core.process_group import ProcessGroup
from collectives.core.types import AllgatherOptions, AllreduceOptions, BroadcastOptions, ReduceOp
from collectives.core.work import FinishingWork, Work
from collectives.errors import UnsupportedOperationError

__all__ = ["method_for"]

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
        tensors: two or more tensors of one shape and data type, the same on every rank; all sparse, or none.
        options: the record of the all-reduce.

    Returns:
        Work whose result is the tensors.

    Raises:
        ValueError: the tensors differ in shape, data type or layout, or share memory.
        UnsupportedOperationError: AVG and PREMUL_SUM, whose meaning would depend on the number of tensors.
    """
    layouts = {isinstance(tensor, torch.Tensor) and tensor.is_sparse for tensor in tensors}
    if True in layouts and (False in layouts or len({id(tensor) for tensor in tensors}) < len(tensors)):
        fail(
            group,
            "all_reduce",
            "tensors of one call must be all sparse, or none, and must not share memory",
        )
    _check_alike(group, "all_reduce", tensors, dense=True not in layouts)
    combine = _COMBINE.get(options.reduceOp.name)
    if combine is None:
        fail(
            group,
            "all_reduce",
            f"{options.reduceOp.name} takes one tensor in a call, but there are {len(tensors)}",
            UnsupportedOperationError,
        )
    if True in layouts:
        total = functools.reduce(torch.add, [tensor.detach() for tensor in tensors])
        work = sparse.allreduce(group, total, options)

        def hand_out_sparse() -> None:
            for tensor in tensors:
                with torch.no_grad():
                    tensor.copy_(total)

        return FinishingWork(work, hand_out_sparse, tensors, options.asyncOp)
    check_outputs(group, "all_reduce", tensors)
    # As in the kernels: ranks add up accumulators, which are rounded once, where they are written.
    wide = _accumulator(tensors[0].dtype)
    total = functools.reduce(combine, [tensor.detach().to(wide) for tensor in tensors])

    def hand_out() -> None:
        for tensor in tensors:
            write(tensor, total)

    return FinishingWork(group.allreduce([total], options), hand_out, tensors, options.asyncOp)


def broadcast(group: ProcessGroup, tensors: Sequence[torch.Tensor], options: BroadcastOptions) -> Work:
    """Copies one of the root's tensors, ``options.rootTensor``, to all tensors of all ranks.

    Args:
        group: the group.
        tensors: two or more dense tensors of one shape and data type, the same on every rank.
        options: the record of the broadcast.

    Returns:
        Work whose result is the tensors.

    Raises:
        ValueError: the tensors differ in shape or data type, or share memory, or the root has no such tensor.
    """
    _check_alike(group, "broadcast", tensors)
    check_outputs(group, "broadcast", tensors)
    if not 0 <= options.rootTensor < len(tensors):
        fail(group, "broadcast", f"rootTensor is {options.rootTensor}, but there are {len(tensors)} tensors")
    chosen = tensors[options.rootTensor]

    def hand_out() -> None:
        for tensor in tensors:
            if tensor is not chosen:
                write(tensor, chosen)

    work = group.broadcast([chosen], dataclasses.replace(options, rootTensor=0))
    return FinishingWork(work, hand_out, tensors, options.asyncOp)


def allgather(
    group: ProcessGroup,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    options: AllgatherOptions,
) -> Work:
    """Gathers all tensors of all ranks, by ranks, in each of the output lists.

    Args:
        group: the group.
        outputs: as many lists as inputs, each with a tensor for every input of every rank.
        inputs: two or more dense tensors of one shape and data type, the same on every rank.
        options: the record of the all-gather.

    Returns:
        Work whose result is the output lists.

    Raises:
        ValueError: the tensors differ in shape or data type, outputs share memory, or there are too many or
            too few.
    """
    wanted = len(inputs) * group.size()
    if len(outputs) != len(inputs) or any(len(entry) != wanted for entry in outputs):
        fail(
            group,
            "all_gather",
            f"output needs {len(inputs)} lists of {wanted} tensors, as there are {len(inputs)} inputs and "
            f"{group.size()} ranks",
        )
    flat = [tensor for entry in outputs for tensor in entry]
    _check_alike(group, "all_gather", [*inputs, *flat])
    check_outputs(group, "all_gather", flat)
    mine = torch.stack([tensor.detach() for tensor in inputs])
    gathered = mine.new_empty((wanted, *mine.shape[1:]))

    def hand_out() -> None:
        for entry in outputs:
            for tensor, values in zip(entry, gathered, strict=True):
                write(tensor, values)

    work = group.all_gather_single(gathered, mine, options)
    return _GatheredLists(work, hand_out, outputs, options.asyncOp)


class _GatheredLists(FinishingWork):
    """An all-gather of several tensors: its value is a list for each input."""

    def __init__(
        self,
        inner: Work,
        finish: Callable[[], None],
        outputs: Sequence[Sequence[torch.Tensor]],
        async_op: bool,
    ) -> None:
        self._lists = [list(entry) for entry in outputs]
        super().__init__(inner, finish, [tensor for entry in outputs for tensor in entry], async_op)

    def _results(self) -> list[Any]:
        return self._lists


def _check_alike(
    group: ProcessGroup, operation: str, tensors: Sequence[torch.Tensor], *, dense: bool = True
) -> None:
    """Checks that the tensors have one shape and data type."""
    for place, tensor in enumerate(tensors):
        if dense:
            check_tensor(group, operation, tensor, f"tensors[{place}]")
        if tensor.shape != tensors[0].shape:
            fail(
                group,
                operation,
                f"tensors of one call must have one shape, but entry 0 has {list(tensors[0].shape)} and "
                f"entry {place} {list(tensor.shape)}",
            )
    check_same_dtype(group, operation, tensors, "tensors of one call")


def _all_reduce(
    group: ProcessGroup,
    tensors: Any = None,
    opts: Any = None,
    timeout: timedelta | None = None,
    *,
    op: Any = None,
    tensor: Any = None,
) -> Work:
    about = overload_arguments(ALL_REDUCE, opts, op, timeout=timeout)
    reduced = ReduceOp.SUM if about["op"] is None else reduction(about["op"])
    options = AllreduceOptions(about["timeout"], about.get("async_op", True), reduced)
    given = tensor if tensors is None else tensors
    if isinstance(given, (list, tuple)) and len(given) > 1:
        return allreduce(group, given, options)
    return sparse.allreduce(group, given[0] if isinstance(given, (list, tuple)) else given, options)


def _broadcast(
    group: ProcessGroup,
    tensors: Any = None,
    opts: Any = None,
    timeout: timedelta | None = None,
    *,
    root: int | None = None,
    tensor: Any = None,
) -> Work:
    about = overload_arguments(BROADCAST, opts, root=root, timeout=timeout)
    options = BroadcastOptions(
        about["timeout"], about.get("async_op", True), about["root"], about.get("root_tensor", 0)
    )
    return broadcast(group, tensor if tensors is None else tensors, options)


def _all_gather(
    group: ProcessGroup,
    output_tensors: Any,
    input_tensors: Any = None,
    opts: Any = None,
    timeout: timedelta | None = None,
) -> Work:
    about = overload_arguments(ALL_GATHER, opts, timeout=timeout)
    options = AllgatherOptions(about["timeout"], about.get("async_op", True))
    return allgather(group, output_tensors, input_tensors, options)


_METHODS: dict[Operation, tuple[int, tuple[str, ...], Callable[..., Work]]] = {
    ALL_REDUCE: (0, ("tensors", "tensor"), _all_reduce),
    BROADCAST: (0, ("tensors", "tensor"), _broadcast),
    ALL_GATHER: (1, ("input_tensors", "input_tensor"), _all_gather),
}
"""Collectives that take several tensors: where these stand, and what takes the arguments of the method."""


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
    is_sparse = operation is ALL_REDUCE and isinstance(one, torch.Tensor) and one.is_sparse
    return partial(method, group) if several or is_sparse else None
