"""Work: states, waiting in any order and from any thread, futures, coalesced operations."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from conformance.oracle import values
from harness import current_store, run_ranks

from collectives import CollectiveTimeoutError, ProcessGroup, Work
from collectives.core.types import AllreduceCoalescedOptions, AllreduceOptions, ReduceOp
from collectives.core.work import CompletedWork, FinishingWork


def gate(name: str, group: ProcessGroup) -> None:
    """Waits on the store until all ranks are here, without an operation of the group."""
    store = current_store()
    store.set(f"{name}{group.rank()}", "here")
    store.wait([f"{name}{rank}" for rank in range(group.size())])


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20.0
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def many_in_flight(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    tensors = [torch.full((1 + 997 * (n % 3),), float(n + me)) for n in range(60)]
    works = [group.allreduce(tensor) for tensor in tensors]
    for n in [*range(59, -1, -2), *range(0, 60, 2)]:
        works[n].wait()
        assert tensors[n].unique().tolist() == [n * size + sum(range(size))]
    parts = [[torch.empty(3) for _ in range(size)] for _ in range(20)]
    mixed: list[Work] = []
    for n in range(20):
        mixed.append(group.allgather(parts[n], torch.full((3,), float(n + me))))
        mixed.append(group.broadcast(tensors[n], root=n % size))
        mixed.append(group.barrier())
    for work in reversed(mixed):
        work.wait()
    for n in range(20):
        assert [part[0].item() for part in parts[n]] == [n + rank for rank in range(size)]


def states(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    x = torch.full((5,), 1.0 + me)
    late = size - 1
    if me == late:
        gate("waiting", group)
    work = group.allreduce(x)
    if me != late:
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(RuntimeError, match="pending"):
            work.result()
        for limit in (timedelta(milliseconds=20), timedelta(seconds=-1)):
            with pytest.raises(CollectiveTimeoutError):
                work.wait(limit)
        assert not work.is_completed()
        gate("waiting", group)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.wait(timedelta(seconds=1)) is True
    work.synchronize()
    work.block_current_stream()
    (output,) = work.result()
    assert output.data_ptr() == x.data_ptr()
    assert output.tolist() == [sum(range(1, size + 1))] * 5
    with pytest.raises(RuntimeError):
        work.source_rank()
    # The group goes on after a wait that ran out.
    group.allreduce(x).wait()


def polled(group: ProcessGroup) -> None:
    x = torch.ones(7)
    work = group.allreduce(x)
    assert eventually(work.is_completed)
    assert x.tolist() == [group.size()] * 7


def forgotten(group: ProcessGroup) -> None:
    """The Work of an operation is dropped, and tensors that only it has."""
    me, size = group.rank(), group.size()
    kept = torch.zeros(30)[::3]
    kept.fill_(1.0 + me)
    group.allreduce(kept)
    for _ in range(20):
        group.allreduce(torch.full((10_000,), 1.0))
        group.send(torch.full((1000,), 3.0), (me + 1) % size, 4)
    gc.collect()
    group.barrier().wait()
    assert eventually(lambda: kept.tolist() == [sum(range(1, size + 1))] * 10)
    got = torch.empty(1000)
    for _ in range(20):
        group.recv(got, (me - 1) % size, 4).wait()
        assert got.unique().tolist() == [3.0]


def futures(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    if me == size - 1:
        gate("asked", group)
    x = torch.full((4,), 1.0 + me)
    strided = torch.full((8,), 1.0)[::2]
    works = [
        group.allreduce(x),
        group.allreduce(strided),
        group.allgather([torch.empty(4) for _ in range(size)], torch.ones(4)),
        group.barrier(),
        group.allreduce_coalesced([torch.ones(2), torch.ones(3, dtype=torch.int32)]),
    ]
    asked = [work.get_future() for work in works]
    called = threading.Event()
    chained = asked[0].then(lambda done: done.value()[0].sum().item())
    asked[0].add_done_callback(lambda _: called.set())
    if me != size - 1:
        assert not asked[0].done()
        gate("asked", group)
    total = float(sum(range(1, size + 1)))
    assert chained.wait() == 4 * total
    assert called.wait(10)
    results = [future.wait() for future in asked]
    assert results[0][0].data_ptr() == x.data_ptr()
    assert results[1][0].tolist() == [float(size)] * 4
    assert strided.tolist() == [float(size)] * 4
    assert len(results[2]) == size
    assert len(results[3]) == 0
    assert [tensor.tolist() for tensor in results[4]] == [[size] * 2, [size] * 3]
    for work, future in zip(works, asked, strict=True):
        assert work.get_future() is future
        assert work.get_future_result().wait() == 0
        assert work.is_completed()
        # A callback on a future that is done runs at once.
        assert future.then(lambda done: len(done.value())).wait() == len(future.value())


def outputs_of_inference(group: ProcessGroup) -> None:
    """Strided outputs made under inference mode, waited for by the caller, a future and nobody."""
    with torch.inference_mode():
        outputs = [torch.ones(8)[::2] for _ in range(3)]
        works = [group.allreduce(output) for output in outputs]
        parts = torch.ones(4 * group.size())
        outputs += [torch.empty(4) for _ in range(2)]
        works += [group.reduce_scatter_single(output, parts) for output in outputs[3:]]
        works[0].wait()
    works[1].get_future().wait()
    works[3].get_future().wait()
    del works
    group.barrier().wait()
    assert eventually(lambda: all(output.tolist() == [float(group.size())] * 4 for output in outputs))


def from_threads(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    x = torch.full((3,), 1.0)
    if me == size - 1:
        gate("waiters", group)
    work = group.allreduce(x)
    seen: list[float] = []

    def wait() -> None:
        work.wait()
        seen.append(x[0].item())

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    if me != size - 1:
        gate("waiters", group)
    for thread in threads:
        thread.join()
    assert seen == [float(size)] * 4

    # Any thread may issue: here messages, each thread with a tag of its own.
    failures: list[str] = []

    def talk(tag: int) -> None:
        for n in range(15):
            got = torch.empty(50)
            receive = group.recv(got, (me - 1) % size, tag)
            group.send(torch.full((50,), float(100 * tag + n)), (me + 1) % size, tag).wait()
            receive.wait()
            if got.unique().tolist() != [100 * tag + n]:
                failures.append(f"tag {tag} message {n}: {got.unique().tolist()}")

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def gil_is_free(group: ProcessGroup) -> None:
    """A rank that waits lets its other threads run."""
    store = current_store()
    if group.rank() == 0:
        store.wait(["other thread"])
        group.allreduce(torch.ones(1), AllreduceOptions(asyncOp=False)).wait()
        return
    other = threading.Timer(0.3, store.set, ("other thread", "x"))
    other.start()
    group.allreduce(torch.ones(1), AllreduceOptions(asyncOp=False)).wait()
    other.join()


def test_waiting_frees_the_gil(backend: str) -> None:
    run_ranks(gil_is_free, 2, backend=backend)


def coalesced(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.float32)
    tensors = [(values(torch.int8, me, n * 5).to(dtype)) for n, dtype in enumerate(dtypes)]
    expected = []
    for tensor in tensors:
        alone = tensor.clone()
        group.allreduce(alone, ReduceOp.MAX).wait()
        expected.append(alone)
    work = group.allreduce_coalesced(tensors, AllreduceCoalescedOptions(reduceOp=ReduceOp.MAX))
    work.wait()
    assert work.is_success()
    for tensor, result, alone in zip(tensors, work.result(), expected, strict=True):
        assert torch.equal(tensor, alone)
        assert result.data_ptr() == tensor.data_ptr()

    inputs = [torch.full((n + 1,), float(10 * me + n)) for n in range(3)]
    lists = [[torch.empty(n + 1) for _ in range(size)] for n in range(3)]
    group.allgather_coalesced(list(zip(*lists, strict=True)), inputs).wait()
    for n in range(3):
        assert [out[0].item() for out in lists[n]] == [10.0 * rank + n for rank in range(size)]

    outputs = [torch.empty(size * (n + 1)) for n in range(3)]
    group.all_gather_single_coalesced(outputs, inputs).wait()
    for n in range(3):
        assert torch.equal(outputs[n], torch.cat(lists[n]))

    parts = [torch.empty(n + 1) for n in range(3)]
    group.reduce_scatter_single_coalesced(parts, outputs).wait()
    for n in range(3):
        assert torch.equal(parts[n], lists[n][me] * size)

    nothing = group.allreduce_coalesced([])
    assert nothing.wait()
    assert nothing.result() == []
    assert nothing.get_future().wait() == []


def shared_memory(group: ProcessGroup) -> None:
    """A tensor that is given twice is reduced as separate copies are; what would be chance is refused."""
    me, size = group.rank(), group.size()
    total = sum(range(1, size + 1))
    for _ in range(3):
        tensor, other = torch.full((1000,), me + 1.0), torch.full((3,), me + 2.0)
        group.allreduce_coalesced([tensor, other, tensor, tensor]).wait()
        assert tensor.unique().tolist() == [total]
        assert other.unique().tolist() == [total + size]
        whole = torch.full((10, 4), me + 1.0)
        parts = [whole[:6], whole[3:], whole[:, 1], whole.view(-1)[::3]]
        group.allreduce_coalesced(parts).wait()
        assert whole.unique().tolist() == [total]
    columns = torch.zeros(5, size)
    group.allgather(list(columns.unbind(1)), torch.full((5,), me + 1.0)).wait()
    assert columns[0].tolist() == list(range(1, size + 1))
    flat = torch.zeros(2 * size)
    group.all_gather_single_coalesced([flat[:size], flat[size:]], [flat[me : me + 1], torch.ones(1)]).wait()
    assert flat.tolist() == [0.0] * size + [1.0] * size
    if size == 1:
        return
    twice, one, many = [torch.zeros(2)] * size, torch.ones(2), torch.ones(2 * size)
    refused: list[Callable[[], Work]] = [
        lambda: group.allgather(twice, one),
        lambda: group.allgather([many[n : n + 2] for n in range(size)], one),
        lambda: group.gather(twice if me == 0 else None, one) if me == 0 else group.allgather(twice, one),
        lambda: group.alltoall(twice, [one] * size),
        lambda: group.allgather_coalesced([[r, r] for r in many.split(2)], [one, one]),
        lambda: group.all_gather_single_coalesced([many, many], [one, one.clone()]),
        lambda: group.all_gather_single_coalesced([many, torch.ones(2 * size)], [one, many[:2]]),
        lambda: group.reduce_scatter_single_coalesced([one, one], [many, many]),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="share memory"):
            call()
    group.barrier().wait()


BODIES = [
    many_in_flight, states, polled, forgotten, futures, outputs_of_inference, from_threads, coalesced,
    shared_memory,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_works(backend: str, world_size: int, body: Callable[[ProcessGroup], None]) -> None:
    run_ranks(body, world_size, backend=backend)


def test_a_last_step_that_a_signal_breaks_off_runs_again() -> None:
    turns = []

    def step() -> None:
        turns.append("begun")
        if len(turns) == 1:
            raise KeyboardInterrupt
        turns.append("ended")

    work = FinishingWork(CompletedWork(), step, [torch.ones(1)], async_op=False)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.wait()
    assert work.wait()
    assert turns == ["begun", "begun", "ended"]
