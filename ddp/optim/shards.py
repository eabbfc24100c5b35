"""Optimizer state on its way from all ranks to one."""

from __future__ import annotations

import io
from typing import Any

import torch

from collectives import GatherOptions, ProcessGroup

__all__ = ["gather_shards"]


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
