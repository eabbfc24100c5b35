"""What groups over MPI record of their operations: the flight record, and events of profilers."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import current_store
from mpi_team import Teams
from waiting import until

import collectives as dist
from collectives.core.recording.dump import FILE_VARIABLE
from collectives.registry.backends import GroupOptions, create_group


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


def both_ways(rank: int, size: int) -> None:
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    group = dist.group.WORLD
    group.set_timeout(timedelta(seconds=50))
    dist.all_reduce(torch.ones(2, 3), dist.ReduceOp.MAX)  # carried out by the core
    work = dist.all_reduce(torch.ones(5), async_op=True)  # by Python
    assert work is not None
    work.wait()
    for _ in range(2):
        dist.send(torch.ones(2), 1, tag=4) if rank == 0 else dist.recv(torch.ones(2), 0, tag=4)
    dist.broadcast(torch.ones(7, dtype=torch.int16), 1)
    dist.barrier()
    kept = group.flight_record.operations()
    message = ("send", "to rank 1, tag 4") if rank == 0 else ("recv", "from rank 0, tag 4")
    assert [(one.name, one.detail, one.number, one.nbytes, one.state) for one in kept] == [
        ("all_reduce", "MAX", 1, 24, "done"),
        ("all_reduce", "SUM", 2, 20, "done"),
        (*message, 1, 8, "done"),
        (*message, 2, 8, "done"),
        ("broadcast", "root 1", 3, 14, "done"),
        ("barrier", "", 4, 0, "done"),
    ]
    assert {one.timeout for one in kept} == {timedelta(seconds=50)}
    assert [one.began for one in kept] == sorted(one.began for one in kept)
    assert group.stats()["all_reduce"]["count"] == 2
    assert (group.stats()[message[0]]["count"], group.flight_record.begun) == (2, 6)
    dist.destroy_process_group()


def test_operations_of_the_core_and_of_python_stand_in_one_order(mpi: Teams) -> None:
    mpi.run(both_ways, 2, backend=None)


def waits(rank: int, size: int) -> None:
    """An operation that takes long goes from the core to Python, and stays one."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    record, store = dist.group.WORLD.flight_record, current_store()

    def look() -> None:
        until(record.operations)
        assert [one.state for one in record.operations()] == ["pending"]
        store.set("seen", "")

    if rank == 0:
        looking = threading.Thread(target=look)
        looking.start()
        dist.all_reduce(torch.ones(3))
        looking.join()
    else:
        store.wait(["seen"])
        dist.all_reduce(torch.ones(3))
    assert [(one.number, one.state) for one in record.operations()] == [(1, "done")]
    assert record.totals()["all_reduce"]["count"] == 1
    dist.destroy_process_group()


def test_an_operation_that_takes_long_is_one(mpi: Teams) -> None:
    mpi.run(waits, 2, backend=None)


def told(rank: int, size: int) -> None:
    """What it is is told in full, though Python has it from the core."""
    group = create_group("mpi", GroupOptions(current_store(), rank, size, timedelta(seconds=1)))
    group.barrier().wait()
    store = current_store()
    if rank == 0:
        said = r"reduce #2 \(MAX, root 0, torch.int32 \[2, 3\]\): passed its time limit"
        with pytest.raises(dist.CollectiveTimeoutError, match=said):
            dist.reduce(torch.ones(2, 3, dtype=torch.int32), op=dist.ReduceOp.MAX, group=group, group_dst=0)
        store.set("told", "")
    store.wait(["told"])
    group.abort()


def test_an_operation_that_takes_long_is_told_as_another(mpi: Teams) -> None:
    mpi.run(told, 2, backend=None)


def wrong_size(rank: int, size: int, prefix: str) -> None:
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    dist.barrier()
    os.environ[FILE_VARIABLE] = prefix
    try:
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            with pytest.raises(dist.DistBackendError, match="the message has 8 bytes"):
                dist.recv(torch.ones(3), 0)
    finally:
        del os.environ[FILE_VARIABLE]
    dist.barrier()
    assert Path(f"{prefix}{rank}.json").exists() == (rank == 1)
    if rank == 1:
        dumped = json.loads(Path(f"{prefix}1.json").read_text())
        failed = dumped["groups"][-1]["operations"][-1]
        assert (failed["name"], failed["state"], failed["number"]) == ("recv", "failed", 1)
        assert failed["error"].startswith("DistBackendError: [rank 1] mpi group")
        assert dumped["reason"] == failed["error"]
        assert dist.group.WORLD.stats()["recv"]["errors"] == 1
    dist.destroy_process_group()


def test_the_first_error_writes_a_file(mpi: Teams, tmp_path: Path) -> None:
    mpi.run(wrong_size, 2, str(tmp_path / "flight_"), backend=None)
