"""How often DistributedDataParallel launches operations over NCCL, counted by its double."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_double.device import DoubleDevice
from nccl_double.groups import load, run_over_double
from torch import nn

from collectives import ProcessGroup
from collectives.ddp import DistributedDataParallel

LARGE = 300  # whose weights have more bytes than gradients that are reduced in place on the CPU


def launches_of_a_pass(
    group: ProcessGroup, path: Path, options: dict[str, Any]
) -> tuple[int, int, list[bool]]:
    torch.manual_seed(3)
    layers = [nn.Linear(LARGE, LARGE) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group, **options)
    alone = nn.Sequential(*[nn.Linear(LARGE, LARGE) for _ in range(4)])
    alone.load_state_dict(model.module.state_dict())
    device = DoubleDevice.shared(torch.device("cpu"))
    before = 0
    for _ in range(3):  # the second lays the buckets out again
        model.zero_grad()
        device.synchronize(device.current_stream())
        before = load(path).launches()
        model(torch.ones(2, LARGE) * (group.rank() + 1)).sum().backward()
    count = load(path).launches() - before
    for rank in range(group.size()):
        (alone(torch.ones(2, LARGE) * (rank + 1)).sum() / group.size()).backward()
    same = [
        torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    return count, len(model.reducer.gradients.buckets), same


@pytest.mark.parametrize(
    "options",
    [{"bucket_cap_mb": 25}, {"bucket_cap_mb": 0.5}, {"gradient_as_bucket_view": True}],
    ids=["one bucket", "several", "views"],
)
def test_a_bucket_is_one_launch(nccl_library: Path, options: dict[str, Any]) -> None:
    for count, buckets, same in run_over_double(launches_of_a_pass, 2, nccl_library, nccl_library, options):
        assert count == buckets
        assert all(same)
