"""Which rank updates which parameters, and where the parameters of one rank lie together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from collectives.ddp.reducer.buckets import layout

__all__ = ["Partition", "flatten_parameters"]


class Partition:
    """Deals items out to ranks, so that these get about the same amount of each kind.

    The largest item goes first, each to the rank that has least of its kind, and of those to the one that has
    least of all kinds (greedy scheduling by size,
    Graham 1969, "Bounds on Multiprocessing Timing Anomalies"): no rank gets more than the mean plus the
    largest item. Items dealt out before stay where they are.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._loads: dict[Hashable, list[int]] = {}
        self._totals = [0] * size

    def deal(self, sizes: Sequence[int], kinds: Sequence[Hashable]) -> list[int]:
        """Returns the rank that gets each item; the same on all ranks.

        Args:
            sizes: amounts, by item.
            kinds: kinds of the items.
        """
        owners = [0] * len(sizes)
        for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            loads = self._loads.setdefault(kinds[item], [0] * self._size)
            owner = min(range(self._size), key=lambda rank: (loads[rank], self._totals[rank]))
            owners[item] = owner
            loads[owner] += sizes[item]
            self._totals[owner] += sizes[item]
        return owners


def flatten_parameters(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Moves parameters into one flat tensor for each device, in place, and returns those.

    Values, shapes and strides stay; ``.data`` of each parameter becomes a view.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_device.setdefault(parameter.device, []).append(parameter)
    flats = []
    for device, together in by_device.items():
        flat = torch.empty(sum(p.numel() for p in together), dtype=together[0].dtype, device=device)
        for parameter, view in zip(together, layout(together, flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        flats.append(flat)
    return flats
