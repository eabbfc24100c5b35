"""The order of the buckets after the first iteration: that of the gradients, as the ranks agree on it.

Each rank traces the order in which the gradients of a pass come. The ranks agree by Borda's count: each gives
every parameter its place in its own trace, and the parameters are sorted by the sum of their places, so that
a bucket holds gradients that come at about the same time on all ranks (PyTorch Distributed, VLDB 2020,
section 6.2.1, "Gradient Order Prediction").

They agree after the first pass, and again where the order changes for good: a rank whose trace has been
another one for several passes requests it. After each agreement it waits for twice as many, so that a model
whose order changes again and again does not make the ranks agree again and again. Parameters that a pass
leaves out come last in its trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp

__all__ = ["OrderTrace", "agree_on_order", "complete_trace"]

_FIRST_PATIENCE = 3
"""For so many passes a new order must hold before it is taken to be one for good."""

_SUM = AllreduceOptions(asyncOp=False, reduceOp=ReduceOp.SUM)


def complete_trace(ready_order: Iterable[int], before: Sequence[int]) -> list[int]:
    """Returns the order of all parameters in a pass; unused ones come last.

    A bucket is launched when it is full and all before it are, and what is unused is known at the end of the
    pass only. So the buckets of unused parameters come behind all others, which are launched as they fill.

    Args:
        ready_order: indices of parameters in the order in which their gradients came; the last time counts.
        before: an order of all parameters, which unused ones keep among each other.
    """
    present = list(reversed(dict.fromkeys(reversed(list(ready_order)))))
    there = set(present)
    return present + [index for index in before if index not in there]


def agree_on_order(group: ProcessGroup, trace: Sequence[int], device: torch.device) -> list[int]:
    """Returns the order that the ranks' traces lead to; called by all of them. Blocks.

    Args:
        group: the ranks.
        trace: this rank's trace.
        device: device of tensors that the group takes.
    """
    places = [0] * len(trace)
    for place, index in enumerate(trace):
        places[index] = place
    sums = torch.tensor(places, dtype=torch.int64, device=device)
    group.allreduce([sums], _SUM).wait()
    total = group.to_host(sums).tolist()
    return sorted(range(len(trace)), key=lambda index: (total[index], -index))


class OrderTrace:
    """The traces of one rank, pass by pass.

    Attributes:
        latest: the trace of the last pass.
        requests_relayout: whether the order has changed for good since the ranks agreed.

    Args:
        before: the order in which gradients are expected before the first pass.
    """

    def __init__(self, before: Iterable[int]) -> None:
        self.latest = list(before)
        self.requests_relayout = False
        self._ready_order: Sequence[int] = ()
        self._agreed: tuple[list[int], Sequence[int]] | None = None
        self._held = 0
        self._patience = _FIRST_PATIENCE

    def note(self, ready_order: Sequence[int]) -> None:
        """Takes in the order in which gradients came in a pass that ended well."""
        if self._agreed is not None and ready_order == self._agreed[1]:  # the usual case, quickly
            self.latest, self._ready_order = self._agreed
            self.requests_relayout = False
            return
        trace = complete_trace(ready_order, self.latest)
        self._held = self._held + 1 if trace == self.latest else 1
        self.latest, self._ready_order = trace, ready_order
        self.requests_relayout = (
            self._agreed is not None and trace != self._agreed[0] and self._held >= self._patience
        )

    def agree(self, group: ProcessGroup | None, device: torch.device) -> list[int]:
        """Returns the order that the ranks' latest traces lead to; called by all of them. Blocks.

        Args:
            group: the ranks; ``None`` for this one's trace alone.
            device: device of tensors that the group takes.
        """
        order = self.latest if group is None else agree_on_order(group, self.latest, device)
        self.mark_agreed()
        return order

    def mark_agreed(self) -> None:
        """Takes note that the ranks agreed on an order, with the latest trace as this rank's part."""
        if self._agreed is not None:
            self._patience *= 2
        self._agreed = self.latest, self._ready_order
        self.requests_relayout = False
