"""Names that ``torch.distributed`` keeps for old programs; each warns and names its successor."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.futures import Future

from collectives.api.collectives import all_gather_single, reduce_scatter_single
from collectives.api.world_state import member_group
from collectives.core.arguments.validation import check_tensor
from collectives.core.operations import ALL_REDUCE_COALESCED
from collectives.core.process_group import ProcessGroup
from collectives.core.types import AllgatherOptions, ReduceOp, make_premul_sum
from collectives.core.work import Work

__all__ = [
    "_all_gather_base",
    "_make_nccl_premul_sum",
    "_reduce_scatter_base",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "reduce_op",
]


_F = TypeVar("_F", bound=Callable[..., Any])


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
    work = target.call(ALL_REDUCE_COALESCED, several, op=ReduceOp.of(op), async_op=async_op)
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


def _deprecated(name: str, function: _F) -> _F:
    """Returns a function under its deprecated name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(name, function.__name__)
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    call.__doc__ = f"Deprecated name of :func:`{function.__name__}`."
    return call  # type: ignore[return-value]


_all_gather_base = _deprecated("_all_gather_base", all_gather_single)
_reduce_scatter_base = _deprecated("_reduce_scatter_base", reduce_scatter_single)
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
