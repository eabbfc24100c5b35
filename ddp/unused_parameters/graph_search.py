"""Finds before a backward pass which parameters no rank can reach in it, so that they are not sent.

Ranks can agree to leave gradients out only before the first bucket is due. So the graph is searched at the
end of forward, which is the price of ``skip_all_reduce_unused_params=True`` (layer dropping, PyTorch
Distributed, VLDB 2020, section 6.2.2); an all-reduce adds up what the ranks found while the backward pass
begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work
from collectives.ddp.reducer.backward_pass import Forward

__all__ = ["GraphSearch", "reachable_parameters"]

_SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)

_MAX_OVERTAKEN = 8
"""After so many synchronised passes of other forwards, a forward is taken to have none itself."""


def reachable_parameters(outputs: Iterable[torch.Tensor], accumulators: Mapping[Any, int]) -> set[int]:
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


class GraphSearch:
    """Searches the graphs of forwards, and keeps the results until a synchronised pass has been over them.

    Attributes:
        is_local: whether nothing communicates, so that nothing is skipped.

    Args:
        group: the ranks.
        accumulators: indices of the parameters by the nodes that accumulate their gradients.
        device: device of tensors that the group takes.
    """

    def __init__(self, group: ProcessGroup, accumulators: Mapping[Any, int], device: torch.device) -> None:
        self._group = group
        self._accumulators = accumulators
        self._device = device
        self.is_local = False
        self._pending: list[Forward] = []
        self._results: weakref.WeakKeyDictionary[Forward, _SearchResult] = weakref.WeakKeyDictionary()

    def search(self, forward: Forward, outputs: Iterable[torch.Tensor], used: Sequence[int]) -> None:
        """Searches the graph of a forward that just ended; called by all ranks. Does not block.

        Args:
            forward: the forward.
            outputs: what it returned.
            used: for each parameter whether a gradient has accumulated that was not averaged.
        """
        reached = reachable_parameters(outputs, self._accumulators)
        mine = [bool(before) or index in reached for index, before in enumerate(used)]
        self._results[forward] = _SearchResult(self._group, mine, self._device)
        self._pending.append(forward)

    def unreachable(self, forwards: Iterable[Forward], count: int) -> tuple[Collection[int], Sequence[int]]:
        """Returns the parameters that no rank reaches in a pass, and those that this one does not reach.

        Blocks until the results of all ranks are here.

        Args:
            forwards: those that the pass is known to belong to.
            count: number of parameters.
        """
        results = [self._results[f] for f in {*self._pending, *forwards} if f in self._results]
        on_any_rank = [result.on_any_rank() for result in results]
        return (
            {index for index in range(count) if not any(reached[index] for reached in on_any_rank)},
            [index for index in range(count) if not any(result.mine[index] for result in results)],
        )

    def forget_averaged(self) -> None:
        """Forgets forwards that had their synchronised pass, or that so many others overtook.

        Called by all ranks at the end of a synchronised pass. Not all forwards have a pass: counted by
        passes, they are forgotten on all ranks at once. One that still has its own begins it with what it
        reaches.
        """
        for forward in self._pending:
            forward.overtaken += 1
        self._pending = [f for f in self._pending if not f.averaged and f.overtaken < _MAX_OVERTAKEN]


class _SearchResult:
    """What the ranks reach in one forward; made by all ranks.

    Args:
        group: the ranks.
        mine: for each parameter whether this rank reaches it, or has accumulated in it before.
        device: device of tensors that the group takes.
    """

    def __init__(self, group: ProcessGroup, mine: Sequence[bool], device: torch.device) -> None:
        self.mine = mine
        self._group = group
        self._sums = torch.tensor([int(value) for value in mine], dtype=torch.int32, device=device)
        self._work: Work | None = group.allreduce([self._sums], _SUM)
        self._on_any_rank: list[bool] = []

    def on_any_rank(self) -> list[bool]:
        """Returns for each parameter whether any rank reaches it; blocks until that is known."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._on_any_rank = [count > 0 for count in self._group.to_host(self._sums).tolist()]
        return self._on_any_rank
