"""Which rank updates which parameters, and where the parameters of one rank lie together."""

from __future__ import annotations

import io
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from collectives import GatherOptions, ProcessGroup
from collectives.ddp.reducer.buckets import layout

__all__ = ["FlatParameters", "Partition", "gather_shards"]


def gather_shards(
    group: ProcessGroup, shard: dict[int, Any], to: int, device: torch.device
) -> list[dict[int, Any]] | None:
    """Gathers the state of all ranks on one; called by all of them. Blocks.

    Args:
        group: the ranks.
        shard: this rank's state.
        to: rank that gets all.
        device: device of tensors that the group takes.

    Returns:
        The shards by rank, with all tensors on the CPU; ``None`` on other ranks.
    """
    file = io.BytesIO()
    torch.save(_on_cpu(shard), file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    group.all_gather_single(lengths, torch.tensor([mine.numel()], device=device)).wait()
    lengths = group.to_host(lengths)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    rows = [torch.empty_like(padded) for _ in range(group.size())] if group.rank() == to else []
    group.gather(rows, [padded], GatherOptions(rootRank=to)).wait()
    shards = [
        torch.load(
            io.BytesIO(group.to_host(row)[:length].numpy().tobytes()), map_location="cpu", weights_only=True
        )
        for row, length in zip(rows, lengths.tolist(), strict=False)
    ]
    return shards or None


def _on_cpu(value: Any) -> Any:
    """Returns a copy of nested containers with all tensors on the CPU, each with memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_cpu, value))
    return value


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


class FlatParameters:
    """Parameters that lie in one flat tensor for each device and data type.

    Values, shapes and strides stay; ``.data`` of each parameter becomes a view.

    Attributes:
        flats: the flat tensors.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        kinds: dict[Hashable, list[torch.Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self.flats: list[torch.Tensor] = []
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []
        for together in kinds.values():
            flat = together[0].new_empty(sum(parameter.numel() for parameter in together))
            self.flats.append(flat)
            self._places += zip(together, layout(together, flat), strict=True)
        self.put_back()

    def put_back(self) -> bool:
        """Moves those parameters back that a program has given other memory.

        Returns:
            Whether all are in their places now; one of another shape, data type or device does not fit.
        """
        fits = True
        for parameter, view in self._places:
            if parameter.is_set_to(view):
                continue
            if (parameter.shape, parameter.dtype, parameter.device) == (view.shape, view.dtype, view.device):
                view.copy_(parameter.detach())
                parameter.data = view
            else:
                fits = False
        return fits
