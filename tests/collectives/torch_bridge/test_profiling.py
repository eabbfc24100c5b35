"""Profiler events: one for each operation, ended with it, and harmless where they cannot end."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from sources import SAFE_PATH
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel
from torch_world import BACKEND, run_torch

pytestmark = pytest.mark.usefixtures("preloaded_python")


def session():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)


def events_of(recorded):
    return [event for event in recorded.events() if event.name.startswith(f"{BACKEND}:")]


def single_events(rank, size):
    tensor = torch.ones(3, 5)
    with session() as recorded:
        dist.all_reduce(tensor)
        dist.all_gather([torch.ones(7), torch.ones(7)], torch.ones(7))
        dist.barrier()
        works = [dist.broadcast(tensor, 0, async_op=True) for _ in range(2)]
        if rank:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)
        works[0].wait()
        works[1].get_future().wait()
        dist.all_reduce(torch.ones(2, dtype=torch.cfloat))
    found = events_of(recorded)
    message = "send" if rank else "recv"
    assert [event.name.removeprefix(f"{BACKEND}:") for event in found] == [
        "all_reduce", "all_gather", "barrier", "broadcast", "broadcast", message, "all_reduce",
    ]  # fmt: skip
    shapes = [[[3, 5]], [[7]], [], [[3, 5]], [[3, 5]], [[3, 5]], [[2, 2]]]
    assert [event.input_shapes for event in found] == shapes
    assert all(event.is_async and event.count == 1 for event in found)


def chosen_names(rank, size):
    with session() as recorded, dist.record_comm("step 7"):
        dist.all_reduce(torch.ones(3, 5))
    assert "step 7" in [event.name for event in recorded.events()]
    assert [event.name for event in events_of(recorded)] == [f"{BACKEND}:all_reduce"]


@pytest.mark.skipif(not hasattr(dist, "record_comm"), reason="this torch has no record_comm")
def test_record_comm_adds_events_of_its_name_as_on_gloo() -> None:
    run_torch(chosen_names, 2)


def gradients(rank, size):
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    with session() as recorded:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
    found = [event for event in events_of(recorded) if event.name == f"{BACKEND}:all_reduce"]
    assert len(found) == 3
    assert all(event.is_async for event in found)


def routes_through_operators(rank, size):
    world, add = dist.group.WORLD, torch.classes.c10d.ReduceOp()
    with session() as recorded:
        dist.Work.unbox(torch.ops.c10d.allreduce_([torch.ones(2)], world.boxed(), add, None)[1]).wait()
        result = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", world.group_name)
        torch.ops._c10d_functional.wait_tensor(result)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
            dist.broadcast(torch.ones(2), 0)
        block.wait()
    names = [event.name.removeprefix(f"{BACKEND}:") for event in events_of(recorded)]
    assert names == ["all_reduce", "all_reduce", "broadcast"]


def stopped_while_open(rank, size):
    """An end would write into memory that the profiler has given back."""
    disable = profiler._disable_profiler
    for _ in range(40):
        with profiler.profile(record_shapes=True) as recorded:
            works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)] if rank == 0 else []
            assert profiler._disable_profiler is not disable or rank
        assert profiler._disable_profiler is disable
        dist.group.WORLD.get_group_store().set(f"stopped{rank}", "1")
        works = works or [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        if rank == 0:
            names = [e.name for e in recorded.function_events if e.name.startswith(BACKEND)]
            assert names == [f"{BACKEND}:all_reduce"] * 3
        dist.barrier()
    gc.collect()


@pytest.mark.parametrize(
    "body",
    [
        single_events, gradients, routes_through_operators, stopped_while_open,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_events(body):
    run_torch(body)


EXIT = """
    import torch, torch.distributed as dist
    import collectives
    dist.init_process_group("collectives", store=dist.HashStore(), rank=0, world_size=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(50)]
    print("reached the end")
"""


@pytest.mark.full
def test_interpreter_exit(tmp_path):
    """Nobody waits for the operations or ends the group."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(EXIT))
    done = subprocess.run(
        [sys.executable, *SAFE_PATH, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "reached the end\n"), done.stderr
