"""Trains under torchrun, the rows of each batch dealt among all ranks; one rank alone stops halfway.

Arguments: a folder for the checkpoint and for what the ranks report, and the name of the backend in torch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS, HALF, ROWS = 6, 3, 4


def batch(step: int) -> torch.Tensor:
    """Returns the rows of a step."""
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step))


def main(folder: Path, backend: str) -> None:
    """Goes on from the checkpoint, if there is one."""
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint, first = folder / "checkpoint", 0
    if checkpoint.exists():
        first, state = torch.load(checkpoint)
        model.module.load_state_dict(state)
    with (folder / f"{rank}-of-{size}").open("a") as began:
        began.write(f"from {first}\n")
    for step in range(first, STEPS if size > 1 else HALF):
        optimizer.zero_grad()
        model(batch(step)[rank::size]).square().mean().backward()
        optimizer.step()
        if rank == 0:
            torch.save((step + 1, model.module.state_dict()), folder / "new")
            (folder / "new").rename(checkpoint)
    if size == 1:
        (folder / "waiting").touch()
        time.sleep(60)  # until torchrun ends this rank to start it again with the other
        sys.exit("nobody joined")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
