"""All-reduce of sparse tensors, which no backend has of its own.

The ranks exchange their numbers of rows; then all gather everybody's indices and values, and each adds up
what has the same index, in rank order, so that every rank gets the same bits.
"""

from __future__ import annotations

import zlib
from datetime import timedelta

import torch

from collectives.core.operations import ALL_GATHER, ALL_GATHER_INTO_TENSOR
from collectives.core.process_group import ProcessGroup
from collectives.core.types import ReduceOp
from collectives.core.work import CoalescedWork, FinishingWork, Work
from collectives.errors import CollectiveMismatchError, UnsupportedOperationError

_MOST_DIMENSIONS = 12
"""What the ranks compare has the same length for tensors of any shape."""


def allreduce(
    group: ProcessGroup,
    tensor: torch.Tensor,
    op: ReduceOp,
    timeout: timedelta | None = None,
    async_op: bool = True,
) -> Work:
    """Adds up a sparse tensor over all ranks, in place; afterwards it is coalesced.

    Blocks until all ranks have exchanged their numbers of rows; with ``async_op`` not for what follows.

    Args:
        group: the group; it gathers.
        tensor: tensor of layout ``torch.sparse_coo`` of the same shape, sparse dimensions and data type on
            every rank.
        op: the reduction.
        timeout: time limit of each step; ``None`` for the group's.
        async_op: whether to return before it is done.

    Raises:
        UnsupportedOperationError: another reduction than SUM, or a tensor of too many dimensions.
        CollectiveMismatchError: the ranks' tensors differ; nothing was changed.
    """
    who = f"[rank {group.rank()}] all_reduce on {group.describe()}"
    if op.code != ReduceOp.SUM.code:
        raise UnsupportedOperationError(
            f"{who}: sparse tensors can only be added up, but the reduction is {op.name}; densify it first"
        )
    if tensor.dim() > _MOST_DIMENSIONS:
        raise UnsupportedOperationError(
            f"{who}: sparse tensors have {_MOST_DIMENSIONS} dimensions at most, but this one has "
            f"{tensor.dim()}; densify it first"
        )
    mine = tensor.detach().coalesce()
    counts = _agree(group, mine, timeout, who)
    rows, width, dense = mine.indices().t().contiguous(), mine.sparse_dim(), mine.values().shape[1:]
    indices = [torch.empty((count, width), dtype=rows.dtype, device=tensor.device) for count in counts]
    values = [torch.empty((count, *dense), dtype=mine.dtype, device=tensor.device) for count in counts]
    works = [
        group.call(ALL_GATHER, indices, rows, timeout=timeout),
        group.call(ALL_GATHER, values, mine.values().contiguous(), timeout=timeout),
    ]

    def add_up() -> None:
        total = sum_of_rows(indices, values, tensor.shape)
        with torch.no_grad():
            tensor.copy_(total.to(tensor.dtype))

    work = FinishingWork(CoalescedWork(works), add_up, [tensor], async_op)
    if not async_op:
        work.wait()
    return work


def sum_of_rows(indices: list[torch.Tensor], values: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Returns the sum of sparse tensors, coalesced; of small formats in float32, for one rounding at the end.

    Args:
        indices: of each tensor, a row for each value.
        values: of each tensor.
        shape: of the tensors.
    """
    addends = torch.cat(values)
    if addends.dtype.itemsize < 4 and addends.is_floating_point():
        addends = addends.float()
    return torch.sparse_coo_tensor(torch.cat(indices).t(), addends, shape, check_invariants=False).coalesce()


def _agree(group: ProcessGroup, mine: torch.Tensor, timeout: timedelta | None, who: str) -> list[int]:
    """Compares the ranks' tensors; returns the number of rows of each."""
    shape = list(mine.shape) + [-1] * (_MOST_DIMENSIONS - mine.dim())
    layout = [mine.sparse_dim(), zlib.crc32(str(mine.dtype).encode()), *shape]
    own = torch.tensor([mine._nnz(), *layout], dtype=torch.int64, device=mine.device)
    table = torch.empty((group.size(), len(own)), dtype=torch.int64, device=mine.device)
    group.call(ALL_GATHER_INTO_TENSOR, table, own, timeout=timeout, async_op=False).wait()
    ranks = group.to_host(table).tolist()
    different = [rank for rank, row in enumerate(ranks) if row[1:] != layout]
    if different:
        lines = [
            f"  rank {rank}: shape {[n for n in row[3:] if n >= 0]}, {row[1]} sparse dimensions"
            for rank, row in enumerate(ranks)
        ]
        raise CollectiveMismatchError(
            f"{who}: the ranks' sparse tensors differ in shape, sparse dimensions or data type (here "
            f"{mine.dtype}) from those of ranks {different}; nothing was changed\n" + "\n".join(lines),
            operation="all_reduce",
        )
    return [row[0] for row in ranks]
