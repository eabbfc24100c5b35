"""The usage map: which parameters took part in the backward pass on any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work

__all__ = ["UsageMap"]

_SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)


class UsageMap:
    """A number for each parameter, and one for trouble, summed over all ranks.

    PyTorch Distributed, VLDB 2020, section 4.2, "Globally Unused Parameters": one map for the whole model,
    filled on the CPU, reduced on a device that the group takes, in one extra all-reduce.

    Args:
        group: the ranks.
        size: number of parameters; zero where only the number for trouble is wanted.
        device: device of the sum.
    """

    def __init__(self, group: ProcessGroup, size: int, device: torch.device) -> None:
        self._group = group
        self._sums = torch.zeros(size + 1, dtype=torch.int32, device=device)
        self._work: Work | None = None

    def start(self, used: Sequence[int], *, trouble: bool) -> None:
        """Issues the sum; called by all ranks after the reductions of all buckets. Does not block.

        Args:
            used: for each parameter 1 where it took part on this rank, else 0.
            trouble: whether something went wrong on this rank.
        """
        filled = torch.tensor([*used, int(trouble)], dtype=torch.int32)
        self._sums.copy_(filled, non_blocking=True)
        self._work = self._group.allreduce([self._sums], _SUM)

    def wait(self) -> tuple[list[int], bool]:
        """Returns on how many ranks each parameter took part, and whether any rank is in trouble; blocks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        *counts, trouble = self._sums.tolist()
        return counts, bool(trouble)
