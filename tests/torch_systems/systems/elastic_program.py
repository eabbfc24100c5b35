"""Trains under torchrun; rank 1 is killed once, in the middle of the first attempt.

Arguments: a folder for the checkpoint and for what the ranks report, and the name of the backend in torch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import collectives  # noqa: F401 - registers the backends

STEPS, LAST_STEP_OF_RANK_1 = 6, 3


def main(folder: Path, backend: str) -> None:
    """Goes on from the checkpoint, if there is one."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert dist.is_torchelastic_launched()
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint, first = folder / "checkpoint", 0
    if checkpoint.exists():
        first, state = torch.load(checkpoint)
        model.module.load_state_dict(state)
    (folder / f"{attempt}-{rank}").write_text(f"{first} of {size}")
    for step in range(first, STEPS):
        if attempt == 0 and rank == 1 and step == LAST_STEP_OF_RANK_1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        try:
            model(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        except Exception as error:
            (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
            raise
        optimizer.step()
        if rank == 0:
            torch.save((step + 1, model.module.state_dict()), folder / "new")
            (folder / "new").rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
