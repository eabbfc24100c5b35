"""Profiler events of programs that use this package directly: one for each operation, whoever issues it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conformance import table
from harness import current_store, run_ranks, run_world
from torch_world import BACKEND, run_torch

import collectives as dist
from collectives.core import profiling
from collectives.core.operations import ALL_REDUCE_COALESCED, BARRIER, OPERATIONS, SCATTER
from collectives.ddp import DistributedDataParallel


def session() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)


def found(recorded: Any) -> list[tuple[str, list[list[int]]]]:
    return [
        (event.name, event.input_shapes)
        for event in recorded.events()
        if event.name.startswith(("host:", "round_robin:", "gloo:"))
    ]


def every_operation(rank: int, size: int, backend: str) -> None:
    dist.init_process_group(backend, store=current_store(), rank=rank, world_size=size)
    tensor, issue, expected = torch.ones(3, 5), table.by_functions(dist), []
    with session() as recorded:
        for operation in OPERATIONS:
            if operation is not ALL_REDUCE_COALESCED:
                outputs, inputs = table.plain(operation, rank, size, 0)
                if operation is BARRIER:
                    dist.barrier()
                else:
                    issue(operation, outputs, inputs, op=dist.ReduceOp.SUM, root=0, splits=None)
                shown = outputs if operation is SCATTER else inputs or outputs
                expected.append((operation.collective, [list(one.shape) for one in shown]))
        if rank:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)
        dist.all_reduce(tensor[:, ::2])  # not dense
        dist.group.WORLD.allreduce(tensor=torch.ones(2)).wait()
    expected += [
        ("send" if rank else "recv", [[3, 5]]), ("all_reduce", [[3, 3]]), ("all_reduce", [[2]]),
    ]  # fmt: skip
    assert found(recorded) == [(f"{backend}:{name}", shapes) for name, shapes in expected]
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["host", "round_robin"])
def test_each_operation_has_one_event(backend: str) -> None:
    run_ranks(every_operation, 2, backend)


PREFIXES = {"collectives": "host:", "torch.distributed": f"{BACKEND}:"}
"""By front end, what names of its events begin with."""


def events_of(recorded: Any, layer: str) -> list[Any]:
    return [event for event in recorded.events() if event.name.startswith(PREFIXES[layer])]


def lasts_as_long(rank: int, size: int, layer: str) -> None:
    """While one rank is late, the event goes on; afterwards it does not."""
    front = importlib.import_module(layer)
    store = current_store()
    with session() as recorded:
        if rank:
            store.wait(["begun"])
        work = front.all_reduce(torch.ones(2), async_op=True)
        if rank == 0:
            assert not work.is_completed()
            with torch.profiler.record_function("meanwhile"):
                torch.ones(2)
            store.set("begun", "")
        work.wait()
        assert work.is_completed()
        assert work.result()[0].tolist() == [2.0, 2.0]
        with torch.profiler.record_function("afterwards"):
            torch.ones(2)
    (event,) = events_of(recorded, layer)
    by_name = {one.name: one.time_range for one in recorded.events()}
    assert event.time_range.end <= by_name["afterwards"].start
    if rank == 0:
        assert event.time_range.start <= by_name["meanwhile"].start
        assert event.time_range.end >= by_name["meanwhile"].end


def failures(rank: int, size: int, layer: str) -> None:
    front = importlib.import_module(layer)
    with session() as recorded:
        with pytest.raises(ValueError, match="root"):
            front.group.WORLD.broadcast(torch.ones(1), root=9)
        with pytest.raises(dist.CollectiveMismatchError):
            front.all_reduce(torch.ones(1 + rank))
        with pytest.raises(dist.CollectiveMismatchError):
            front.all_reduce(torch.ones(1 + rank), async_op=True).wait()
        front.barrier()
    names = [event.name.removeprefix(PREFIXES[layer]) for event in events_of(recorded, layer)]
    assert names == ["broadcast", "all_reduce", "all_reduce", "barrier"]
    assert not profiling.possible()
    front.all_reduce(torch.ones(3))  # by the fast path again


def threads(rank: int, size: int, layer: str) -> None:
    """Sessions are of a thread; others' operations are not in them."""
    front = importlib.import_module(layer)
    groups = [front.new_group() for _ in range(2)]

    def use_the_other() -> None:
        for _ in range(30):
            front.all_reduce(torch.ones(2), group=groups[1])

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(use_the_other)
        for _ in range(5):
            with session() as recorded:
                for _ in range(6):
                    front.all_reduce(torch.ones(2), group=groups[0], async_op=True).wait()
            assert len(events_of(recorded, layer)) == 6
        other.result()


@pytest.mark.parametrize("layer", PREFIXES)
@pytest.mark.parametrize("body", [lasts_as_long, failures, threads])
def test_events_of_both_front_ends(body: Callable[..., None], layer: str) -> None:
    if layer == "collectives":
        run_world(body, 2, layer)
    else:
        run_torch(body, 2, layer)


def trains(rank: int, size: int) -> None:
    dist.init_process_group("round_robin", store=current_store(), rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    with session() as recorded:
        model(torch.ones(1, 3)).sum().backward()
    names = [name for name, _ in found(recorded)]
    assert "round_robin:all_reduce" in names
    assert not [name for name in names if name.startswith("host:")]
    dist.destroy_process_group()


def test_data_parallel_training_shows_its_operations() -> None:
    run_ranks(trains, 2)


def names_of_the_programs_own(rank: int, size: int) -> None:
    dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    with session() as recorded:
        with dist.record_comm("step 1"):
            dist.all_reduce(torch.ones(2))
            with dist.record_comm("within"), pytest.raises(TypeError):
                dist.all_reduce("no tensor")  # type: ignore[arg-type]
            other = threading.Thread(target=dist.barrier)
            other.start()
            other.join()
            dist.broadcast(torch.ones(2), 0)
        dist.barrier()
    names = {"step 1", "within"}
    shown = [event.name for event in recorded.events() if event.name in names or "host:" in event.name]
    assert shown == ["step 1", "within", "step 1", "host:barrier"]
    dist.destroy_process_group()


def test_operations_get_the_name_that_the_program_gives() -> None:
    run_ranks(names_of_the_programs_own, 2)


def test_names_that_stand_for_one_method_stay_one() -> None:
    assert dist.ProcessGroup._allgather_base is dist.ProcessGroup.all_gather_single
    assert dist.ProcessGroup.all_to_all_single is dist.ProcessGroup.alltoall_base
