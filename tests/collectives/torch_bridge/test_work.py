"""The Work of torch: waiting, asking, futures, and staying alive in the hands of C++."""

from __future__ import annotations

import gc
import inspect
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conformance import table
from conformance.test_forms import OPTIONS
from torch._C import _distributed_c10d as c10d
from torch_world import run_torch

from collectives.core.operations import ALL_TO_ALL_SINGLE, Operand


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


def synchronous(record, root=None):
    """Returns an option record of a call that returns when the operation is done."""
    record.asyncOp = False
    if root is not None:
        record.rootRank = root
    return record


def done_at_return(rank, size):
    """Calls of a group with synchronous records, as torch's functions make them; the Work still tells all."""
    group = dist.group.WORLD
    for name, operation in table.BY_NAME.items():
        if not operation.methods:  # torch has none
            continue
        outputs, inputs = table.plain(operation, rank, size, 1)
        record = getattr(c10d, OPTIONS[name].__name__)()
        kinds = ((operation.output, outputs), (operation.input, inputs))
        operands = [table.operand(*one) for one in kinds if one[0] is not Operand.NONE]
        splits = [[], []] if operation is ALL_TO_ALL_SINGLE else []
        before = group._get_sequence_number_for_group()
        call = getattr(group, operation.methods[0])
        work = call(*operands, *splits, synchronous(record, 1 if operation.rooted else None))
        assert isinstance(work, dist.Work)
        assert work.is_completed(), name
        assert work.is_success()
        assert work.exception() is None
        assert work.wait() is True
        assert work.get_future() is work.get_future()
        for got in (work.result(), work.get_future().wait()):
            assert [tensor.tolist() for tensor in got] == [tensor.tolist() for tensor in outputs], name
        with pytest.raises(RuntimeError, match="receive"):
            work.source_rank()
        assert group._get_sequence_number_for_group() == before + 1, name
    b = value(6)
    script = torch.ops.c10d.allreduce_([b], group.boxed(), torch.classes.c10d.ReduceOp(), None, False)[1]
    gc.collect()
    assert dist.Work.unbox(script).wait()
    assert torch.equal(b, value(12))
    base = dist.ProcessGroup.allreduce(group, [b], synchronous(c10d.AllreduceOptions()))
    gc.collect()
    assert torch.equal(base.get_future().wait()[0], value(24))


def limits_in_records(rank, size):
    """A synchronous call keeps to its record's own limit, and leaves the factor of a reduction in."""
    scaled = value(rank + 1)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.0))
    assert torch.equal(scaled, value(6))
    store, group, late = dist.group.WORLD.get_group_store(), dist.new_group(), dist.new_group()
    if rank == 0:
        record = synchronous(c10d.AllreduceOptions())
        record.timeout = timedelta(milliseconds=200)
        with pytest.raises(dist.DistError, match=r"0\.2 s"):
            group.allreduce([value(1)], record).wait()
        if "timeout" in inspect.signature(dist.barrier).parameters:
            with pytest.raises(dist.DistError, match=r"0\.1 s"):
                dist.barrier(late, timeout=timedelta(milliseconds=100))
        store.set("late", "")
    else:
        store.wait(["late"])


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
    boxed = [dist.all_reduce(value(rank), async_op=True).boxed() for _ in tensors]
    record = synchronous(c10d.AllreduceOptions())
    boxed += [world.allreduce([value(rank)], record).boxed(), dist.barrier(async_op=True).boxed()]
    gc.collect()
    for script in boxed:
        work = dist.Work.unbox(script)
        assert work.wait()
        assert dist.Work.unbox(work.boxed()).wait()
    assert torch.equal(dist.Work.unbox(boxed[0]).get_future().wait()[0], value(1))
    results = [torch.ops._c10d_functional.all_reduce(value(rank), "sum", name) for _ in range(4)]
    base = [dist.ProcessGroup.allreduce(world, [tensor]) for tensor in tensors]
    base_futures = [work.get_future() for work in base]
    del base
    gc.collect()
    for result in results:
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(result), value(1))
    for future in base_futures:
        assert torch.equal(future.wait()[0], value(2))


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


@pytest.mark.parametrize(
    "body",
    [
        asking,
        futures,
        done_at_return,
        limits_in_records,
        alive_in_cpp,
        many_threads,
    ],
    ids=lambda body: body.__name__,
)
def test_work(body):
    run_torch(body)
