"""The Work of torch: waiting, asking, futures, and staying alive in the hands of C++."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bridge.torch_world import BACKEND, run_torch


def value(number):
    return torch.full((2,), float(number))


def asking(rank, size):
    tensor = value(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait() is True
    assert work.wait(timedelta(seconds=5)) is True
    assert work.wait(timedelta(0)) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(work.result()[0], value(1))
    work.synchronize()
    work.block_current_stream()
    with pytest.raises(RuntimeError, match="receive"):
        work.source_rank()
    pending = dist.barrier(async_op=True) if rank == 0 else None
    if pending:
        assert not pending.is_completed()
        assert not pending.is_success()
        assert pending.exception() is None
    dist.group.WORLD.get_group_store().set(f"asked{rank}", "")
    dist.group.WORLD.get_group_store().wait(["asked0", "asked1"])
    pending = pending or dist.barrier(async_op=True)
    pending.wait()
    assert pending.is_completed()


def futures(rank, size):
    tensor = value(rank)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert work.get_future() is future
    assert torch.equal(future.wait()[0], value(1))
    assert future.done()
    chained = future.then(lambda done: done.value()[0] * 10)
    assert torch.equal(chained.wait(), value(10))
    assert work.get_future_result().wait() == 0
    parts = [torch.zeros(2), torch.zeros(2)]
    gathered = dist.all_gather(parts, value(rank), async_op=True).get_future().wait()
    assert torch.equal(torch.stack(gathered), torch.stack([value(0), value(1)]))
    both = torch.futures.collect_all(
        [dist.all_reduce(value(rank), async_op=True).get_future() for _ in range(2)]
    )
    assert all(torch.equal(done.value()[0], value(1)) for done in both.wait())
    dist.barrier(async_op=True).get_future().wait()


def alive_in_cpp(rank, size):
    """C++ keeps only its half of a Work; the Python half must last as long."""
    world, add = dist.group.WORLD, torch.classes.c10d.ReduceOp()
    name = world.group_name
    tensors = [value(rank) for _ in range(4)]
    scripts = [torch.ops.c10d.allreduce_([tensor], world.boxed(), add, None)[1] for tensor in tensors]
    gc.collect()
    for tensor, script in zip(tensors, scripts, strict=True):
        dist.Work.unbox(script).wait()
        assert torch.equal(tensor, value(1))
    results = [torch.ops._c10d_functional.all_reduce(value(rank), "sum", name) for _ in range(4)]
    base = [dist.ProcessGroup.allreduce(world, [tensor]) for tensor in tensors]
    base_futures = [work.get_future() for work in base]
    del base
    gc.collect()
    for result in results:
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(result), value(1))
    for future in base_futures:
        assert torch.equal(future.wait()[0], value(2))


def nobody_waits(rank, size):
    tensors = [value(rank) for _ in range(8)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    gc.collect()
    dist.barrier()
    for tensor in tensors:
        assert torch.equal(tensor, value(1))


def many_threads(rank, size):
    groups = [dist.new_group() for _ in range(3)]
    failures = []

    def use(group, number):
        try:
            for turn in range(20):
                tensor = value(rank + number + turn)
                dist.all_reduce(tensor, group=group)
                assert torch.equal(tensor, value(1 + 2 * (number + turn)))
                result = torch.ops._c10d_functional.all_reduce(value(rank), "sum", group.group_name)
                assert torch.equal(torch.ops._c10d_functional.wait_tensor(result), value(1))
        except Exception as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=use, args=(group, n)) for n, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def profiler_events(rank, size):
    tensor = torch.ones(3, 5)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as recorded:
        dist.all_reduce(tensor)
        dist.all_gather([torch.ones(7), torch.ones(7)], torch.ones(7))
        dist.barrier()
        works = [dist.broadcast(tensor, 0, async_op=True) for _ in range(2)]
        if rank:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)
        for work in works:
            work.get_future().wait()
    found = [event for event in recorded.events() if event.name.startswith(f"{BACKEND}:")]
    names = [event.name.removeprefix(f"{BACKEND}:") for event in found]
    assert names == [
        "all_reduce",
        "all_gather",
        "barrier",
        "broadcast",
        "broadcast",
        "recvsend"[4 * rank :][:4],
    ]
    assert [event.input_shapes for event in found[:3]] == [[[3, 5]], [[7]], []]
    assert all(event.count == 1 for event in found)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        with pytest.raises(ValueError, match="root"):
            dist.group.WORLD.broadcast(tensor, root=9)
        dist.barrier()
    assert [e.name for e in recorded.events() if e.name.startswith(BACKEND)] == [
        f"{BACKEND}:broadcast",
        f"{BACKEND}:barrier",
    ]


@pytest.mark.parametrize(
    "body",
    [asking, futures, alive_in_cpp, nobody_waits, many_threads, profiler_events],
    ids=lambda body: body.__name__,
)
def test_work(body):
    run_torch(body)
