"""Which parameters a pass can leave out on all ranks, because none of them reaches them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import ProcessGroup
from collectives.ddp.reducer.passes import Forward
from collectives.ddp.unused_parameters.reach import ReachExchange, reached_from
from collectives.ddp.unused_parameters.usage import Usage

__all__ = ["Skipping"]

_PATIENCE = 8
"""After so many synchronised passes of other forwards, a forward is taken to have none itself."""


class Skipping:
    """Walks the graphs of forwards and keeps what they reach until a synchronised pass has been over them.

    Attributes:
        is_local: whether nothing communicates, so that nothing is skipped.

    Args:
        group: the ranks.
        usage: what this rank uses of the parameters; a static graph is not walked.
        accumulators: indices of the parameters by the nodes that accumulate their gradients.
        device: device of tensors that the group takes.
    """

    def __init__(
        self, group: ProcessGroup, usage: Usage, accumulators: Mapping[Any, int], device: torch.device
    ) -> None:
        self._group = group
        self._usage = usage
        self._accumulators = accumulators
        self._device = device
        self.is_local = False
        self._ahead: list[Forward] = []

    @property
    def walks(self) -> bool:
        """Whether graphs are walked to find what no rank reaches."""
        return not self._usage.static and not self.is_local

    def walk(self, forward: Forward, outputs: Iterable[torch.Tensor]) -> None:
        """Walks the graph of a forward that just ended; called by all ranks, which tell each other."""
        reached = reached_from(outputs, self._accumulators)
        mine = [bool(used) or index in reached for index, used in enumerate(self._usage.used)]
        forward.reach = ReachExchange(self._group, mine, self._device)
        self._ahead.append(forward)

    def unreached(self, forwards: Iterable[Forward]) -> tuple[Collection[int], Sequence[int]]:
        """Returns the parameters that no rank reaches in a pass, and those that this one does not reach.

        Blocks until the ranks' walks are known. The second is empty where no graph is walked.

        Args:
            forwards: those that the pass is known to belong to.
        """
        if not self.walks:
            return self._usage.unused_everywhere, ()
        exchanges = [f.reach for f in {*self._ahead, *forwards} if f.reach is not None]
        everyone = [exchange.anyone() for exchange in exchanges]
        everywhere = range(len(self._usage.used))
        return (
            {index for index in everywhere if not any(e[index] for e in everyone)},
            [index for index in everywhere if not any(e.mine[index] for e in exchanges)],
        )

    def forget_averaged(self) -> None:
        """Gives up the walks of forwards that had their synchronised pass, or that so many others overtook.

        Called by all ranks at the end of a synchronised pass. Not all forwards have a pass: counted by
        passes, they are given up on all ranks at once. One that still has its own begins it with what it
        reaches.
        """
        for forward in self._ahead:
            forward.overtaken += 1
        self._ahead = [f for f in self._ahead if not f.averaged and f.overtaken < _PATIENCE]
