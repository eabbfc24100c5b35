"""What groups over MPI record of their operations: the flight record, and events of profilers."""

from __future__ import annotations

import torch
from harness import current_store
from mpi_team import Teams

import collectives as dist


def recorded(rank: int, size: int) -> None:
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    # While a profiler records, the core takes no operation of its own.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as session:
        dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        assert work is not None
        work.wait()
        dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)
    message = "recv" if rank else "send"
    names = [event.name for event in session.events() if event.name.startswith("mpi:")]
    assert names == ["mpi:all_reduce", "mpi:all_reduce", f"mpi:{message}"]
    operations = dist.flight_record()["groups"][-1]["operations"]
    assert [(one["name"], one["number"], one["shape"], one["state"]) for one in operations] == [
        ("all_reduce", 1, [3], "done"),
        ("all_reduce", 2, [100_000], "done"),
        (message, 1, [2], "done"),
    ]
    dist.destroy_process_group()


def test_operations_are_recorded(mpi: Teams) -> None:
    mpi.run(recorded, 2, backend=None)
