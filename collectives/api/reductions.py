"""Reductions of tensors over the ranks, with the names and meanings of ``torch.distributed``.

What holds for all collectives is said in :mod:`collectives.api.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from collectives.api.coalescing import DeferredWork, defer, pending
from collectives.api.collectives import issue
from collectives.api.world_state import Group, group_rank, member_group
from collectives.core import sparse
from collectives.core.arguments.validation import fail
from collectives.core.operations import (
    ALL_REDUCE,
    ALL_REDUCE_INTO_TENSOR,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
)
from collectives.core.process_group import ProcessGroup
from collectives.core.types import ReduceOp
from collectives.core.work import Async, Sync, Work, finish

__all__ = [
    "all_reduce",
    "all_reduce_into_tensor",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
]


@overload
def all_reduce(tensor: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> None: ...
@overload
def all_reduce(tensor: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Async = ...) -> Work: ...
@overload
def all_reduce(
    tensor: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces a tensor over all ranks, in place; afterwards it is bitwise the same on every rank.

    Args:
        tensor: same shape and data type on every rank; input and output. Complex ones take SUM, AVG and
            PREMUL_SUM. One of layout ``torch.sparse_coo`` takes SUM and is coalesced afterwards; the call
            then blocks until all ranks have told how many rows they have.
        op: how elements are combined, one of ours or of ``torch.distributed``.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: elements of the tensor share memory, or PREMUL_SUM has no factor.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            tensor = torch.tensor([1.0, 2.0]) * (rank + 1)
            collectives.all_reduce(tensor)  # [3.0, 6.0] on both

            work = collectives.all_reduce(tensor, collectives.ReduceOp.MAX, async_op=True)
            ...  # anything that leaves the tensor alone
            work.wait()
    """
    target = member_group(group, "all_reduce")
    if target is None:
        return None
    if op.__class__ is not ReduceOp:
        op = _reduction(target, "all_reduce", op)
    if pending and defer(target, "all_reduce", op, tensor):
        return DeferredWork() if async_op else None
    work = target.fast_collective(ALL_REDUCE.opcode, tensor, reduce_op=op.code, async_op=async_op)
    if work is None:
        if isinstance(tensor, torch.Tensor) and tensor.is_sparse:
            work = sparse.allreduce(target, tensor, op, async_op=async_op)
        else:
            work = target.call(ALL_REDUCE, tensor, op=op, async_op=async_op)
    return finish(work, async_op)


@overload
def all_reduce_into_tensor(
    output: Tensor, input: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...
) -> None: ...
@overload
def all_reduce_into_tensor(
    output: Tensor, input: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Async = ...
) -> Work: ...
@overload
def all_reduce_into_tensor(
    output: Tensor, input: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_reduce_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces a tensor over all ranks into another one; bitwise the same on every rank.

    Ranks may mix it with :func:`all_reduce`, which is the same with ``output`` for ``input``. ``host`` reads
    and writes each tensor once; other backends copy first.

    Args:
        output: as many elements as ``input``, of the same data type; output, and may be ``input``.
        input: same shape and data type on every rank; unchanged.
        op: how elements are combined, one of ours or of ``torch.distributed``.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: the tensors differ in size, data type or device, or PREMUL_SUM has no factor.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            total = torch.empty(2)
            collectives.all_reduce_into_tensor(total, torch.ones(2))  # [2.0, 2.0] on both
    """
    target = member_group(group, "all_reduce_into_tensor")
    if target is None:
        return None
    if op.__class__ is not ReduceOp:
        op = _reduction(target, "all_reduce_into_tensor", op)
    return issue(target, ALL_REDUCE_INTO_TENSOR, output, input, async_op, op)


@overload
def reduce(
    tensor: Tensor, dst: int | None = ..., op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...,
    group_dst: int | None = ...,
) -> None: ...  # fmt: skip
@overload
def reduce(
    tensor: Tensor, dst: int | None = ..., op: ReduceOp = ..., group: Group = ..., async_op: Async = ...,
    group_dst: int | None = ...,
) -> Work: ...  # fmt: skip
@overload
def reduce(
    tensor: Tensor, dst: int | None = ..., op: ReduceOp = ..., group: Group = ..., async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...  # fmt: skip
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduces a tensor over all ranks to one rank, in place there; the other ranks' tensors are unchanged.

    Args:
        tensor: same shape and data type on every rank.
        dst: rank of the default group that gets the result.
        op: how elements are combined, one of ours or of ``torch.distributed``.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.
        group_dst: the rank that gets the result, counted within the group; instead of ``dst``.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: no destination or two are given, or it is not in the group.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            tensor = torch.ones(2)
            collectives.reduce(tensor, dst=0)  # [2.0, 2.0] on rank 0, [1.0, 1.0] on rank 1
    """
    target = member_group(group, "reduce")
    if target is None:
        return None
    root = group_rank(target, "reduce", dst, group_dst, "dst")
    if op.__class__ is not ReduceOp:
        op = _reduction(target, "reduce", op)
    return issue(target, REDUCE, tensor, None, async_op, op, root)


@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...
) -> None: ...
@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: ReduceOp = ..., group: Group = ...,
    async_op: Async = ...,
) -> Work: ...  # fmt: skip
@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: ReduceOp = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces a list of tensors over all ranks; each rank gets the result of its own entry.

    Args:
        output: of the size of this rank's entry; output.
        input_list: one tensor for each rank.
        op: how elements are combined, one of ours or of ``torch.distributed``.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: ``input_list`` has not a tensor for each rank, ``output`` is not of the size of its entry,
            or tensors differ in data type or device.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            inputs = [torch.ones(2), torch.full((3,), 2.0)]
            output = torch.empty(2 + rank)
            collectives.reduce_scatter(output, inputs)  # [2.0, 2.0] on rank 0, [4.0, 4.0, 4.0] on rank 1
    """
    target = member_group(group, "reduce_scatter")
    if target is None:
        return None
    if op.__class__ is not ReduceOp:
        op = _reduction(target, "reduce_scatter", op)
    return issue(target, REDUCE_SCATTER, output, input_list, async_op, op, listed="input_list")


@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...
) -> None: ...
@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Async = ...
) -> Work: ...
@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces a tensor over all ranks; each rank gets one of its equal parts.

    Args:
        output: this rank's part; output, and may be that part of ``input``.
        input: ``world size`` times the elements of ``output``: a concatenation along dimension 0, or a stack.
        op: how elements are combined, one of ours or of ``torch.distributed``.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: the sizes do not fit, or the tensors differ in data type or device.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            output = torch.empty(2)
            collectives.reduce_scatter_single(output, torch.arange(4.0))
            # [0.0, 2.0] on rank 0, [4.0, 6.0] on rank 1
    """
    target = member_group(group, "reduce_scatter_single")
    if target is None:
        return None
    if op.__class__ is not ReduceOp:
        op = _reduction(target, "reduce_scatter_single", op)
    if pending and defer(target, "reduce_scatter_single", op, output, input):
        return DeferredWork() if async_op else None
    return issue(target, REDUCE_SCATTER_TENSOR, output, input, async_op, op)


reduce_scatter_tensor = reduce_scatter_single


def _reduction(group: ProcessGroup, operation: str, op: object) -> ReduceOp:
    """Returns a reduction of ours for one of ours or of ``torch.distributed``."""
    if op.__class__ is ReduceOp:
        return op
    try:
        return ReduceOp.of(op)
    except TypeError as error:
        fail(group, operation, str(error), TypeError)
