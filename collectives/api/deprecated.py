"""Names that ``torch.distributed`` keeps for old programs; each warns and names its successor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.futures import Future

from collectives.api.collectives import all_gather_single
from collectives.api.reductions import reduce_scatter_single
from collectives.api.world_state import member_group
from collectives.core.arguments.validation import check_tensor
from collectives.core.process_group import ProcessGroup
from collectives.core.types import AllgatherOptions, AllreduceCoalescedOptions, ReduceOp, make_premul_sum
from collectives.core.work import Work

__all__ = [
    "_all_gather_base",
    "_make_nccl_premul_sum",
    "_reduce_scatter_base",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "reduce_op",
]


def _warn(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated; use {instead}", FutureWarning, stacklevel=3)


def all_reduce_coalesced(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """Reduces several tensors over all ranks, in place. Deprecated: use ``_coalescing_manager``.

    Args:
        tensors: tensors of any shapes and data types, the same on every rank.
        op: how elements are combined, one of ours or of ``torch.distributed``.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return before the operation is done.

    Returns:
        A future with ``async_op=True``, as in ``torch.distributed``; else, and on a rank that is not in the
        group, ``None``.

    Raises:
        TypeError: an argument is no tensor.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            the future carries it.
    """
    _warn("all_reduce_coalesced", "all_reduce of each, inside _coalescing_manager")
    target = member_group(group, "all_reduce_coalesced")
    if target is None:
        return None
    several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    work = target.allreduce_coalesced(several, AllreduceCoalescedOptions(None, async_op, ReduceOp.of(op)))
    return _finish(work, async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """Gathers several tensors of every rank on all ranks. Deprecated: use ``all_gather`` of each.

    Args:
        output_tensor_lists: for each rank a list of tensors as that rank's ``input_tensor_list``; output.
        input_tensor_list: this rank's tensors.
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return before the operation is done.

    Returns:
        A future with ``async_op=True``, as in ``torch.distributed``; else, and on a rank that is not in the
        group, ``None``.

    Raises:
        TypeError: an argument is no tensor.
        UnsupportedOperationError: the group does not take such a device, data type or reduction.
        DistBackendError: a rank died, passed the time limit or called something else; with ``async_op=True``
            the future carries it.
    """
    _warn("all_gather_coalesced", "all_gather of each")
    target = member_group(group, "all_gather_coalesced")
    if target is None:
        return None
    inputs = [check_tensor(target, "all_gather_coalesced", t, "input") for t in input_tensor_list]
    work = target.allgather_coalesced(output_tensor_lists, inputs, AllgatherOptions(None, async_op))
    return _finish(work, async_op)


def _finish(work: Work, async_op: bool) -> Future[Any] | None:
    if async_op:
        return work.get_future()
    work.wait()
    return None


def _all_gather_base(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Deprecated name of :func:`all_gather_single`."""
    _warn("_all_gather_base", "all_gather_single")
    return all_gather_single(output_tensor, input_tensor, group, async_op)


def _reduce_scatter_base(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Deprecated name of :func:`reduce_scatter_single`."""
    _warn("_reduce_scatter_base", "reduce_scatter_single")
    return reduce_scatter_single(output, input, op, group, async_op)


_make_nccl_premul_sum = make_premul_sum


class _ReduceOpOfOld:
    """Deprecated name of :class:`ReduceOp`, with ``SUM``, ``PRODUCT``, ``MIN`` and ``MAX``."""

    _OPS = ("SUM", "PRODUCT", "MIN", "MAX")

    def __getattr__(self, name: str) -> ReduceOp:
        """Returns the reduction of that name, with a warning."""
        if name not in self._OPS:
            raise AttributeError(f"reduce_op has {', '.join(self._OPS)}, but not {name!r}; use ReduceOp")
        _warn(f"reduce_op.{name}", f"ReduceOp.{name}")
        op: ReduceOp = getattr(ReduceOp, name)
        return op


reduce_op = _ReduceOpOfOld()
"""Deprecated name of :class:`ReduceOp`, with ``SUM``, ``PRODUCT``, ``MIN`` and ``MAX``."""
