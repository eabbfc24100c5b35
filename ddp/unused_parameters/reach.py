"""Which parameters a backward pass can reach, known to all ranks before it begins.

Ranks can agree to leave buckets out only before the first of them is due. So the graph is walked at the end
of forward, which is the price of ``skip_all_reduce_unused_params=True`` (layer dropping, PyTorch Distributed,
VLDB 2020, section 6.2.2); the ranks' findings are added up while the backward pass begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work

__all__ = ["ReachExchange", "reached_from"]

_SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)


def reached_from(outputs: Iterable[torch.Tensor], accumulators: Mapping[Any, int]) -> set[int]:
    """Returns the parameters that the outputs depend on.

    Args:
        outputs: tensors.
        accumulators: indices of the parameters by the nodes that accumulate their gradients.
    """
    reached: set[int] = set()
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            index = accumulators.get(following)
            if index is None:
                stack.append(following)
            else:
                reached.add(index)
    return reached


class ReachExchange:
    """What the ranks reach, on its way to all of them; made by all ranks at the end of a forward.

    Args:
        group: the ranks.
        mine: for each parameter whether this rank reaches it, or has accumulated in it before.
        device: device of tensors that the group takes.
    """

    def __init__(self, group: ProcessGroup, mine: Sequence[bool], device: torch.device) -> None:
        self.mine = mine
        self._sums = torch.tensor([int(value) for value in mine], dtype=torch.int32, device=device)
        self._work: Work | None = group.allreduce([self._sums], _SUM)
        self._anyone: list[bool] = []

    def anyone(self) -> list[bool]:
        """Returns for each parameter whether any rank reaches it; blocks until that is known."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._anyone = [count > 0 for count in self._sums.tolist()]
        return self._anyone

    def wait(self) -> None:
        """Blocks until the exchange is over."""
        if self._work is not None:
            self._work.wait()
