"""Collectives on tensors, with the names and meanings of ``torch.distributed``.

What holds for all of them: every rank of the group calls the same functions in the same order with the same
arguments, apart from its tensors. Ranks in arguments (``src``, ``dst``) are ranks of the default group;
``group_src`` and ``group_dst`` count within the group. ``group=None`` is the default group. With
``async_op=False`` the call blocks until the outputs are complete and returns ``None``; with ``async_op=True``
it returns a :class:`Work`, and the tensors must not be touched until that is done. On a rank that is not in
the group, a call warns, does nothing and returns ``None``. Only data moves: no function takes part in
autograd.

Wrong arguments raise :class:`ValueError`, :class:`TypeError` or :class:`UnsupportedOperationError` before
anything is sent. What goes wrong later raises a :class:`DistBackendError`, from the call or, with
``async_op=True``, from ``Work.wait()``: :class:`PeerLostError` where a rank died,
:class:`CollectiveTimeoutError` where one did not come within the group's time limit, and
:class:`CollectiveMismatchError` where the backend finds that ranks called different collectives, or gave
different sizes or data types.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch import Tensor

from collectives.api.coalescing import DEFERRED, DeferredWork, defer, pending
from collectives.api.world_state import Group, group_rank, member_group, root_rank, world
from collectives.core import operations, quantized, sparse
from collectives.core.arguments.validation import check_limit, fail
from collectives.core.operations import ALL_REDUCE, Operation
from collectives.core.process_group import ProcessGroup
from collectives.core.types import ReduceOp
from collectives.core.work import Async, Sync, Work, finish

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "quantized_all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
]


def issue(
    group: ProcessGroup | None,
    operation: Operation,
    outputs: Any,
    inputs: Any,
    async_op: bool,
    *,
    op: Any = ReduceOp.SUM,
    root: tuple[int | None, int | None, str] = (None, None, ""),
    function: str = "",
) -> Work | None:
    """Issues a collective, by the fast path of the group where that takes it; returns what its user gets.

    Args:
        group: the group as the user gave it.
        operation: the collective.
        outputs: what it writes, as the user gave it.
        inputs: what it only reads, likewise.
        async_op: whether the user gets a Work.
        op: the reduction.
        root: the root, counted in the default group and within the group, and the name of that argument.
        function: name of the user's function, where it is not the collective's.
    """
    function = function or operation.name
    target = member_group(group, function, depth=4)
    if target is None:
        return None
    place = 0
    if operation.rooted:
        place = (group_rank if operation.in_place else root_rank)(target, function, *root)
    reduction = op if op.__class__ is ReduceOp else _reduction(target, function, op)
    if pending and operation in DEFERRED and defer(target, operation, reduction, outputs, inputs):
        return DeferredWork() if async_op else None
    code = reduction.code
    work = target.fast_collective(operation.opcode, outputs, inputs, code, place, operation.lists, async_op)
    if work is None:
        about = {"op": reduction, "root": place, "async_op": async_op, "listed": _LISTS.get(operation, "")}
        work = target.call(operation, outputs, inputs, **about)
    return finish(work, async_op)


_LISTS = {
    operations.ALL_GATHER: "tensor_list",
    operations.GATHER: "gather_list",
    operations.REDUCE_SCATTER: "input_list",
    operations.SCATTER: "scatter_list",
}
"""What users call the list of a tensor for each rank, where messages call it so."""


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
    if pending and defer(target, ALL_REDUCE, op, tensor):
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
        ValueError: the tensors differ in size, data type or device, or overlap in part, or PREMUL_SUM has no
            factor.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            total = torch.empty(2)
            collectives.all_reduce_into_tensor(total, torch.ones(2))  # [2.0, 2.0] on both
    """
    return issue(group, operations.ALL_REDUCE_INTO_TENSOR, output, input, async_op, op=op)


@overload
def quantized_all_reduce(
    tensor: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ..., *, dtype: torch.dtype = ...,
    block: int = ...,
) -> None: ...  # fmt: skip
@overload
def quantized_all_reduce(
    tensor: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: Async = ..., *,
    dtype: torch.dtype = ..., block: int = ...,
) -> Work: ...  # fmt: skip
@overload
def quantized_all_reduce(
    tensor: Tensor, op: ReduceOp = ..., group: Group = ..., async_op: bool = ..., *, dtype: torch.dtype = ...,
    block: int = ...,
) -> Work | None: ...  # fmt: skip
def quantized_all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    dtype: torch.dtype = torch.int8,
    block: int = quantized.BLOCK,
) -> Work | None:
    """Reduces a tensor over all ranks, in place, in 8 bits for each element; bitwise the same on every rank.

    Sends about a quarter of the bytes of float32, at any number of ranks. Each rank adds up a part of the
    tensor, in float32 whatever the tensor's data type, by an all-to-all, and all gather the sums. What is
    sent, both times, is rounded to 8 bits, with a scale for each block of elements; the guide on numerics
    states how far the result can be off. Infinity and NaN stay what they are, in their place. With one rank
    nothing is done.

    Args:
        tensor: same shape and data type on every rank, of float32, float16, bfloat16 or float64; input and
            output.
        op: SUM or AVG.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return before the sums are gathered, with a Work; the tensor must not be touched
            until it is done. The call blocks while the ranks add up, unless the tensor is on a CUDA device.
        dtype: what elements become: ``torch.int8`` for levels of equal distance, with the least error for the
            largest elements; or ``torch.float8_e4m3fn``, of 4 significant bits, with the least error for
            elements that are small beside others in their block.
        block: elements that share a scale, of 4 bytes; 64 and more for at most 27 % of float32's bytes.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        TypeError: ``block`` is no integer.
        ValueError: ``dtype`` is another one, or ``block`` is not positive.
        UnsupportedOperationError: the tensor has another data type, or the reduction is another one.
        CollectiveMismatchError: the ranks' tensors or arguments differ; nothing was changed. Not raised for
            tensors on a CUDA device, which the host does not wait for: their ranks must agree.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` may raise it.

    Example:
        With 2 ranks::

            tensor = torch.tensor([1.0, -127.0]) * (rank + 1)
            collectives.quantized_all_reduce(tensor)  # [3.0, -381.0] on both
    """
    target = member_group(group, "quantized_all_reduce")
    if target is None:
        return None
    if op.__class__ is not ReduceOp:
        op = _reduction(target, "quantized_all_reduce", op)
    work = quantized.allreduce(target, tensor, op, dtype=dtype, block=block, async_op=async_op)
    return finish(work, async_op)


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
    return issue(group, operations.REDUCE, tensor, None, async_op, op=op, root=(dst, group_dst, "dst"))


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
    return issue(group, operations.REDUCE_SCATTER, output, input_list, async_op, op=op)


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
    return issue(
        group,
        operations.REDUCE_SCATTER_TENSOR,
        output,
        input,
        async_op,
        op=op,
        function="reduce_scatter_single",
    )


reduce_scatter_tensor = reduce_scatter_single


def _reduction(group: ProcessGroup, operation: str, op: object) -> ReduceOp:
    """Returns a reduction of ours for one of ours or of ``torch.distributed``."""
    try:
        return ReduceOp.of(op)
    except TypeError as error:
        fail(group, operation, str(error), TypeError)


@overload
def broadcast(
    tensor: Tensor, src: int | None = ..., group: Group = ..., async_op: Sync = ...,
    group_src: int | None = ...,
) -> None: ...  # fmt: skip
@overload
def broadcast(
    tensor: Tensor, src: int | None = ..., group: Group = ..., async_op: Async = ...,
    group_src: int | None = ...,
) -> Work: ...  # fmt: skip
@overload
def broadcast(
    tensor: Tensor, src: int | None = ..., group: Group = ..., async_op: bool = ...,
    group_src: int | None = ...,
) -> Work | None: ...  # fmt: skip
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies one rank's tensor to all ranks, in place.

    Args:
        tensor: same number of elements and data type on every rank; input on the source, output elsewhere.
        src: the source, a rank of the default group.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.
        group_src: the source, counted within the group; instead of ``src``.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: no source or two are given, or the source is not in the group.
        UnsupportedOperationError: the group does not take such a device or data type.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            tensor = torch.full((2,), float(rank))
            collectives.broadcast(tensor, src=1)  # [1.0, 1.0] on both
    """
    return issue(group, operations.BROADCAST, tensor, None, async_op, root=(src, group_src, "src"))


@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: Sync = ...
) -> None: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: Async = ...
) -> Work: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gathers every rank's tensor on all ranks; tensors of different ranks may differ in size.

    Args:
        tensor_list: one tensor for each rank, of the size of that rank's ``tensor``; output.
        tensor: this rank's tensor.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: ``tensor_list`` has not a tensor for each rank, this rank's entry is not of the size of
            ``tensor``, or tensors differ in data type or device.
        UnsupportedOperationError: the group does not take such a device or data type.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            outputs = [torch.empty(2) for _ in range(2)]
            collectives.all_gather(outputs, torch.full((2,), float(rank)))
            # [[0.0, 0.0], [1.0, 1.0]] on both
    """
    return issue(group, operations.ALL_GATHER, tensor_list, tensor, async_op)


@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: Sync = ...
) -> None: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: Async = ...
) -> Work: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = ..., async_op: bool = ...
) -> Work | None: ...
def all_gather_single(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gathers every rank's tensor into one, in rank order; all of equal size.

    Args:
        output_tensor: ``world size`` times the elements of ``input_tensor``: a concatenation along dimension
            0, or a stack. May contain ``input_tensor`` as its own part.
        input_tensor: this rank's tensor.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: the sizes do not fit, or the tensors differ in data type or device.
        UnsupportedOperationError: the group does not take such a device or data type.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            output = torch.empty(4)
            collectives.all_gather_single(output, torch.full((2,), float(rank)))
            # [0.0, 0.0, 1.0, 1.0] on both
    """
    return issue(
        group,
        operations.ALL_GATHER_INTO_TENSOR,
        output_tensor,
        input_tensor,
        async_op,
        function="all_gather_single",
    )


all_gather_into_tensor = all_gather_single


@overload
def gather(
    tensor: Tensor, gather_list: Sequence[Tensor] | None = ..., dst: int | None = ..., group: Group = ...,
    async_op: Sync = ..., group_dst: int | None = ...,
) -> None: ...  # fmt: skip
@overload
def gather(
    tensor: Tensor, gather_list: Sequence[Tensor] | None = ..., dst: int | None = ..., group: Group = ...,
    async_op: Async = ..., group_dst: int | None = ...,
) -> Work: ...  # fmt: skip
@overload
def gather(
    tensor: Tensor, gather_list: Sequence[Tensor] | None = ..., dst: int | None = ..., group: Group = ...,
    async_op: bool = ..., group_dst: int | None = ...,
) -> Work | None: ...  # fmt: skip
def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gathers every rank's tensor on one rank; all of equal size.

    Args:
        tensor: this rank's tensor.
        gather_list: on the destination, one tensor for each rank; output. ``None`` elsewhere.
        dst: rank of the default group that gathers; without both, rank 0 of the default group.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.
        group_dst: the rank that gathers, counted within the group; instead of ``dst``.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: the destination has no ``gather_list``, another rank has one, or the sizes do not fit.
        UnsupportedOperationError: the group does not take such a device or data type.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            outputs = [torch.empty(2) for _ in range(2)] if rank == 0 else None
            collectives.gather(torch.full((2,), float(rank)), outputs, dst=0)
    """
    return issue(group, operations.GATHER, gather_list, tensor, async_op, root=(dst, group_dst, "dst"))


@overload
def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor] | None = ..., src: int | None = ..., group: Group = ...,
    async_op: Sync = ..., group_src: int | None = ...,
) -> None: ...  # fmt: skip
@overload
def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor] | None = ..., src: int | None = ..., group: Group = ...,
    async_op: Async = ..., group_src: int | None = ...,
) -> Work: ...  # fmt: skip
@overload
def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor] | None = ..., src: int | None = ..., group: Group = ...,
    async_op: bool = ..., group_src: int | None = ...,
) -> Work | None: ...  # fmt: skip
def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Gives each rank one tensor of a list that one rank has; all of equal size.

    Args:
        tensor: this rank's tensor; output.
        scatter_list: on the source, one tensor for each rank. ``None`` elsewhere.
        src: rank of the default group that has the list; without both, rank 0 of the default group.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.
        group_src: the rank that has the list, counted within the group; instead of ``src``.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: the source has no ``scatter_list``, another rank has one, or the sizes do not fit.
        UnsupportedOperationError: the group does not take such a device or data type.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            inputs = [torch.zeros(2), torch.ones(2)] if rank == 0 else None
            output = torch.empty(2)
            collectives.scatter(output, inputs, src=0)  # [0.0, 0.0] on rank 0, [1.0, 1.0] on rank 1
    """
    return issue(group, operations.SCATTER, tensor, scatter_list, async_op, root=(src, group_src, "src"))


@overload
def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ..., group: Group = ..., async_op: Sync = ...,
) -> None: ...  # fmt: skip
@overload
def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ..., group: Group = ..., async_op: Async = ...,
) -> Work: ...  # fmt: skip
@overload
def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ..., group: Group = ..., async_op: bool = ...,
) -> Work | None: ...  # fmt: skip
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Splits a tensor along dimension 0, sends part r to rank r, and concatenates what the ranks send here.

    Args:
        output: the parts received, in rank order; output.
        input: the parts sent, in rank order.
        output_split_sizes: rows of each part received; ``None`` for equal parts.
        input_split_sizes: rows of each part sent; ``None`` for equal parts.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: splits do not add up to dimension 0 or are not one for each rank, dimension 0 does not
            divide without them, or what this rank sends itself has not the size that it expects.
        UnsupportedOperationError: the group does not take such a device or data type.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            output = torch.empty(2)
            collectives.all_to_all_single(output, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
            # [0.0, 10.0] on rank 0, [1.0, 11.0] on rank 1
    """
    if not (output_split_sizes or input_split_sizes):
        return issue(group, operations.ALL_TO_ALL_SINGLE, output, input, async_op)
    target = member_group(group, "all_to_all_single")
    if target is None:
        return None
    splits = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
    return finish(
        target.call(operations.ALL_TO_ALL_SINGLE, output, input, async_op=async_op, **splits), async_op
    )


@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = ...,
    async_op: Sync = ...,
) -> None: ...  # fmt: skip
@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = ...,
    async_op: Async = ...,
) -> Work: ...  # fmt: skip
@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...  # fmt: skip
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends one tensor to each rank and receives one from each.

    Args:
        output_tensor_list: one tensor for each rank, of the size of what that rank sends here; output.
        input_tensor_list: one tensor for each rank; may differ in size.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work; the tensors must not be touched until it is done.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        ValueError: a list has not a tensor for each rank, tensors differ in data type or device, or what this
            rank sends itself has not the size that it expects.
        UnsupportedOperationError: the group does not take such a device or data type.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            ``Work.wait()`` raises it.

    Example:
        With 2 ranks::

            inputs = [torch.full((1,), 10.0 * rank), torch.full((2,), 10.0 * rank + 1)]
            outputs = [torch.empty(1 + rank), torch.empty(1 + rank)]
            collectives.all_to_all(outputs, inputs)  # [0.0], [10.0] on rank 0
    """
    return issue(group, operations.ALL_TO_ALL, output_tensor_list, input_tensor_list, async_op)


@overload
def barrier(
    group: Group = ..., async_op: Sync = ..., device_ids: list[int] | None = ...,
    timeout: timedelta | None = ...,
) -> None: ...  # fmt: skip
@overload
def barrier(
    group: Group = ..., async_op: Async = ..., device_ids: list[int] | None = ...,
    timeout: timedelta | None = ...,
) -> Work: ...  # fmt: skip
@overload
def barrier(
    group: Group = ..., async_op: bool = ..., device_ids: list[int] | None = ...,
    timeout: timedelta | None = ...,
) -> Work | None: ...  # fmt: skip
def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Blocks until every rank of the group has called it; with ``async_op=True``, the Work does.

    Args:
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work that is done when every rank has called this.
        device_ids: number of the accelerator's device to use, as a list of one; ``None`` for the device that
            ``init_process_group`` was given, where the group serves it.
        timeout: time limit; ``None`` takes the group's.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        TypeError: ``device_ids`` is no list of one int, or ``timeout`` no timedelta.
        ValueError: ``timeout`` is not positive.
        DistBackendError: a rank died (``PeerLostError``), or did not come in time
            (``CollectiveTimeoutError``). With ``async_op=True`` it is raised by ``Work.wait()``.
    """
    target = member_group(group, "barrier")
    if target is None:
        return None
    bound = world.device
    if bound is not None and (bound.type == "cpu" or bound.type not in target.capabilities.devices):
        bound = None
    if timeout is None and device_ids is None and bound is None:
        work = target.fast_collective(operations.BARRIER.opcode, async_op=async_op)
        if work is not None:
            return finish(work, async_op)
    timeout = check_limit(target, "barrier", timeout)
    if device_ids is not None:
        if not isinstance(device_ids, list) or len(device_ids) != 1 or not isinstance(device_ids[0], int):
            fail(target, "barrier", f"device_ids must be a list of one int, but is {device_ids!r}", TypeError)
        accelerator = torch.accelerator.current_accelerator()
        bound = torch.device(accelerator.type if accelerator else "cpu", device_ids[0])
    return finish(target.call(operations.BARRIER, timeout=timeout, async_op=async_op, device=bound), async_op)


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Barrier that names the ranks which did not come; blocks. For every backend.

    All ranks come to the same outcome: that of the first to see a rank dead or its limit passed.

    Args:
        group: the ranks that take part; ``None`` for the default group.
        timeout: time limit; ``None`` takes the group's.
        wait_all_ranks: ``False`` reports the first missing rank, ``True`` lists all.

    Raises:
        CollectiveTimeoutError: ranks did not come in time; the message names them on every rank. The group
            stays usable.
        PeerLostError: a rank died, whether it had come or not; raised at once, for ``wait_all_ranks`` too.
        DistNetworkError: the group's store failed.
        DistBackendError: the group was made without a store.

    Example:
        With 2 ranks::

            from datetime import timedelta

            try:
                collectives.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
            except collectives.CollectiveTimeoutError as error:
                print(error)  # names the ranks that are missing
    """
    target = member_group(group, "monitored_barrier")
    if target is None:
        return
    if isinstance(timeout, float):  # as torch.distributed, which takes no int here
        warnings.warn(f"timeout is {timeout!r}, taken as seconds; give a datetime.timedelta", stacklevel=2)
        timeout = timedelta(seconds=timeout)
    timeout = check_limit(target, "monitored_barrier", timeout)
    target.monitored_barrier(timeout, wait_all_ranks)
