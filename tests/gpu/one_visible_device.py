"""What a rank runs that sees one CUDA device only.

The module asks CUDA nothing when it is loaded: CUDA reads the variable when it is first asked something.
"""

from __future__ import annotations

import os

import torch
from harness import current_store


def in_sight_of_one(rank: int, size: int, visible: list[str]) -> list[float]:
    """Returns the ranks' sum, of ranks that each see one of the devices named."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank % len(visible)]
    import collectives
    from collectives.ranks.cuda_devices import shared_gpu_environment

    if len(visible) < size:  # what a rank sees does not tell
        os.environ.update(shared_gpu_environment(rank, os.environ))
    torch.cuda.set_device(0)
    assert torch.cuda.device_count() == 1
    device = torch.device("cuda", 0)
    collectives.init_process_group(
        "nccl", store=current_store(), rank=rank, world_size=size, device_id=device
    )
    tensor = torch.full((3,), rank + 1.0, device=device)
    collectives.all_reduce(tensor)
    found: list[float] = tensor.tolist()
    collectives.destroy_process_group()
    return found
