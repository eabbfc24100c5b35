"""The mpi backend on CUDA tensors, where there is an MPI that takes their memory."""

from __future__ import annotations

import pytest
import torch
from gpu.cuda_ranks import needs_device, take_device
from mpi_team import Team, find_installations

from collectives import ProcessGroup, ReduceOp

pytestmark = needs_device


def everything(group: ProcessGroup) -> str | None:
    """Returns why nothing was tried, or ``None``."""
    reason = group.capabilities.why_not("all_reduce", device="cuda", dtype=torch.float32)
    if reason is not None:
        return reason
    rank, size = group.rank(), group.size()
    take_device(rank, size)

    def full(value: float, count: int) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)  # what is issued comes behind it on the stream
        return torch.full((count,), value, device="cuda")

    for count in (3, 5_000, 300_000):
        for apart in (False, True):
            x = full(rank + 1.0, 2 * count)
            x = x[::2] if apart else x[:count]
            group.allreduce(x).wait()
            assert x.unique().tolist() == [size * (size + 1) / 2]
            group.allreduce(x, ReduceOp.AVG).wait()
            assert x.unique().tolist() == [size * (size + 1) / 2]
            x.fill_(rank)
            group.broadcast(x, root=1).wait()
            assert x.unique().tolist() == [1.0]
            outputs = [torch.empty(count, device="cuda") for _ in range(size)]
            group.allgather(outputs, x.fill_(rank)).wait()
            assert [part.unique().tolist() for part in outputs] == [[other] for other in range(size)]
            whole = torch.empty(size * count, device="cuda")
            group.all_gather_single(whole, full(float(rank), count)).wait()
            assert whole[::count].tolist() == list(range(size))
            part = torch.empty(count, device="cuda")
            group.reduce_scatter_single(part, whole).wait()
            assert part.unique().tolist() == [float(rank * size)]
            sent = group.send(full(rank + 5.0, count), (rank + 1) % size)
            group.recv(x, (rank - 1) % size).wait()
            sent.wait()
            assert x.unique().tolist() == [(rank - 1) % size + 5.0]
    return None


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_device_memory(name: str) -> None:
    installation = next((one for one in find_installations() if one.name == name), None)
    if installation is None:
        pytest.skip(f"there is no {name} here")
    with Team(installation, 2) as team:
        reasons = set(team.run(everything, timeout=110.0))
    if reasons != {None}:
        pytest.skip(f"nothing to try: {reasons.pop()}")
