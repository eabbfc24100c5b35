"""Training through a group that counts, over the double of NCCL: as through the group itself."""

from __future__ import annotations

from pathlib import Path

import torch
from nccl_double.fixtures import nccl_library  # noqa: F401 - a fixture
from nccl_double.groups import run_over_double

from collectives import ProcessGroup
from collectives.bench.training.counting_group import CountingGroup
from collectives.ddp import DistributedDataParallel


def train(group: ProcessGroup) -> tuple[bool, int, list[bool]]:
    counting = CountingGroup(group)
    found = []
    for through in (group, counting):
        torch.manual_seed(3)
        module = DistributedDataParallel(torch.nn.Linear(8, 4), process_group=through)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.full((2, 8), group.rank() + 1.0)).square().mean().backward()
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in module.parameters()])
    same = [torch.equal(*pair) for pair in zip(*found, strict=True)]
    return counting.is_stream_ordered(torch.device("cpu")), counting.sent_bytes > 3 * 4 * 36, same


def test_training_does_not_wait_for_the_device(nccl_library: Path) -> None:  # noqa: F811
    assert run_over_double(train, 2, nccl_library) == [(True, True, [True, True])] * 2
