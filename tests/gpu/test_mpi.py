"""The mpi backend on CUDA tensors, where there is an MPI that takes their memory."""

from __future__ import annotations

import pytest
import torch
from cuda_aware_mpi import every_operation
from gpu.cuda_ranks import needs_device, take_device
from mpi_team import Team, find_installations

from collectives import ProcessGroup

pytestmark = needs_device


def everything(group: ProcessGroup) -> str | None:
    """Returns why nothing was tried, or ``None``."""
    reason = group.capabilities.why_not("all_reduce", device="cuda", dtype=torch.float32)
    if reason is None:
        take_device(group.rank(), group.size())
        every_operation(group, "cuda")
        torch.cuda._sleep(100_000_000)  # a producer that is late on the current stream
        x = torch.full((300_001,), group.rank() + 1.0, device="cuda")
        group.allreduce(x).wait()
        assert x.unique().tolist() == [group.size() * (group.size() + 1) / 2]
    return reason


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_device_memory(name: str) -> None:
    installation = next((one for one in find_installations() if one.name == name), None)
    if installation is None:
        pytest.skip(f"there is no {name} here")
    with Team(installation, 2) as team:
        reasons = set(team.run(everything, timeout=110.0))
    if reasons != {None}:
        pytest.skip(f"nothing to try: {reasons.pop()}")
