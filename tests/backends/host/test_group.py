"""The host backend by itself: the paths that sizes choose, point-to-point matching, order, keep-alive."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks, run_world

import collectives as dist
from collectives.core.work import CompletedWork

# Inline, one-shot, and long messages; the last ones need several chunks with an uneven end.
COUNTS = [0, 1, 22, 23, 4099, 16385, 100_003, 1_000_003]
SIZES = [1, 2, 3, 4]


def _ramp(count, start=0):
    return torch.arange(count, dtype=torch.float32) % 1000 + start


def _reductions(group):
    rank, size = group.rank(), group.size()
    for asynchronous in (False, True):
        for count in COUNTS:
            total = _ramp(count) * size + size * (size - 1) / 2
            tensor = _ramp(count, rank)
            group.allreduce([tensor], dist.AllreduceOptions(asyncOp=asynchronous)).wait()
            assert torch.equal(tensor, total), count
            root = count % size
            tensor = _ramp(count, rank)
            group.reduce([tensor], dist.ReduceOptions(asyncOp=asynchronous, rootRank=root)).wait()
            assert torch.equal(tensor, total if rank == root else _ramp(count, rank)), (count, root)
            parts = [_ramp(count + r, rank + r) for r in range(size)]
            output = torch.empty(count + rank)
            group.reduce_scatter([output], [parts], dist.ReduceScatterOptions(asyncOp=asynchronous)).wait()
            assert torch.equal(output, _ramp(count + rank, rank) * size + size * (size - 1) / 2), count


@pytest.mark.parametrize("size", SIZES)
def test_reductions_on_every_path(size):
    run_ranks(_reductions, size, backend="host")


def _movements(group):
    rank, size = group.rank(), group.size()
    for asynchronous in (False, True):
        for count in COUNTS:
            root = count % size
            tensor = _ramp(count, rank)
            group.broadcast([tensor], dist.BroadcastOptions(asyncOp=asynchronous, rootRank=root)).wait()
            assert torch.equal(tensor, _ramp(count, root))

            outputs = [torch.empty(count + 7 * r) for r in range(size)]
            mine = _ramp(count + 7 * rank, rank)
            group.allgather([outputs], [mine], dist.AllgatherOptions(asyncOp=asynchronous)).wait()
            for r, output in enumerate(outputs):
                assert torch.equal(output, _ramp(count + 7 * r, r)), (count, r)

            outputs = [torch.empty(count) for _ in range(size)] if rank == root else None
            options = dist.GatherOptions(asyncOp=asynchronous, rootRank=root)
            group.gather(outputs, [_ramp(count, rank)], options).wait()
            for r, output in enumerate(outputs or ()):
                assert torch.equal(output, _ramp(count, r))

            inputs = [_ramp(count, r) for r in range(size)] if rank == root else None
            output = torch.empty(count)
            group.scatter([output], inputs, dist.ScatterOptions(asyncOp=asynchronous, rootRank=root)).wait()
            assert torch.equal(output, _ramp(count, rank))


@pytest.mark.parametrize("size", SIZES)
def test_movements_on_every_path(size):
    run_ranks(_movements, size, backend="host")


def _all_to_alls(group):
    rank, size = group.rank(), group.size()
    for count in COUNTS:
        # Very unequal parts: rank 0 sends long ones, the others short ones or nothing.
        def length(sender, receiver, count=count):
            return count + receiver if sender == 0 else (sender + receiver) % 3

        inputs = [_ramp(length(rank, r), 10 * rank + r) for r in range(size)]
        outputs = [torch.empty(length(r, rank)) for r in range(size)]
        group.alltoall(outputs, inputs).wait()
        for r, output in enumerate(outputs):
            assert torch.equal(output, _ramp(length(r, rank), 10 * r + rank)), (count, r)
        flat = torch.cat(inputs)
        output = torch.empty(sum(part.numel() for part in outputs))
        group.alltoall_base(output, flat, [o.numel() for o in outputs], [i.numel() for i in inputs]).wait()
        assert torch.equal(output, torch.cat(outputs))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_of_very_unequal_parts(size):
    run_ranks(_all_to_alls, size, backend="host")


def _strided(group, asynchronous):
    rank, size = group.rank(), group.size()
    matrix = torch.zeros(40, 50)
    column = matrix[:, 7]
    column.fill_(rank + 1)
    work = group.allreduce([column], dist.AllreduceOptions(asyncOp=asynchronous))
    work.wait()
    total = size * (size + 1) / 2
    assert torch.equal(column, torch.full((40,), total))
    assert matrix.sum() == 40 * total
    conjugate = torch.full((3,), complex(rank, 1)).conj()
    group.allreduce([conjugate], dist.AllreduceOptions(asyncOp=asynchronous)).wait()
    assert torch.equal(conjugate, torch.full((3,), complex(size * (size - 1) / 2, -size)))
    negative = torch._neg_view(torch.full((3,), float(rank + 1)))
    group.allreduce([negative], dist.AllreduceOptions(asyncOp=asynchronous)).wait()
    assert torch.equal(negative, torch.full((3,), -total))
    assert negative.is_neg()
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    group.allreduce(parameter, dist.AllreduceOptions(asyncOp=asynchronous)).wait()
    assert torch.equal(parameter, torch.full((2, 3), float(size)))
    with pytest.raises(NotImplementedError, match="layout"):
        group.allreduce([torch.eye(2).to_sparse()], dist.AllreduceOptions(asyncOp=asynchronous))
    with pytest.raises(TypeError, match="must be a tensor"):
        group.allreduce([[1.0]], dist.AllreduceOptions(asyncOp=asynchronous))
    options = dist.AllreduceOptions(asyncOp=asynchronous, reduceOp=dist.ReduceOp.BAND)
    with pytest.raises(NotImplementedError, match="BAND"):
        group.allreduce([torch.ones(2)], options)
    outputs = torch.zeros(6, size)
    group.allgather([list(outputs.unbind(1))], [torch.full((6,), float(rank))]).wait()
    assert torch.equal(outputs, torch.arange(size).float().repeat(6, 1))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_strided_and_conjugated_tensors(asynchronous):
    run_ranks(_strided, 2, asynchronous, backend="host")


def _in_order(group):
    rank, size = group.rank(), group.size()
    tensors = [torch.full((1 + 3000 * (i % 40),), float(rank + i)) for i in range(200)]
    works = [group.allreduce([tensor]) for tensor in tensors]
    last = torch.ones(1)
    group.allreduce([last], dist.AllreduceOptions(asyncOp=False))  # waits its turn behind the queue
    assert all(work.is_completed() for work in works)
    for i, tensor in enumerate(tensors):
        assert (tensor == size * i + size * (size - 1) / 2).all(), i
    assert last.item() == size


def test_operations_run_in_order_of_issue():
    run_ranks(_in_order, 3, backend="host")


def _hold_the_gil(group, fifo):
    """Rank 0 issues operations and keeps the GIL until rank 1, which needs them, has theirs."""
    fd = os.open(fifo, os.O_RDWR)
    rank = group.rank()
    group.barrier().wait()
    tensors = [torch.full((count,), rank + 1.0) for count in (2, 3_000, 1_000_000)]
    works = [group.allreduce([tensor]) for tensor in tensors]
    if rank == 0:
        readable = ctypes.create_string_buffer(struct.pack("ihh", fd, select.POLLIN, 0))
        # Unlike functions of CDLL, it runs with the GIL.
        assert ctypes.PyDLL(None).poll(readable, 1, 20_000) == 1
    for work in works:
        work.wait()
    if rank == 1:
        os.write(fd, b"x")
    os.close(fd)
    assert all((tensor == 3).all() for tensor in tensors)


@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_operations_in_flight_need_no_gil(placement, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    run_ranks(_hold_the_gil, 2, str(tmp_path / "fifo"), backend="host", placement=placement)


def _dropped(group):
    tensors = [torch.ones(200_000) for _ in range(20)]
    for tensor in tensors:
        group.allreduce([tensor])
    results = [tensor[:1] for tensor in tensors]  # keeps memory to look at, not the tensors
    for tensor in tensors:
        group.allreduce([tensor * 2])  # nobody holds this one but the group
    del tensors, tensor
    gc.collect()
    strided = torch.ones(4, 2)
    group.allreduce([strided[:, 0]])
    group.barrier().wait()
    assert all(result.item() == 2 for result in results)
    deadline = time.monotonic() + 10
    while strided[0, 0] != 2 and time.monotonic() < deadline:  # copied back by the futures' thread
        time.sleep(0.01)
    assert torch.equal(strided, torch.tensor([[2.0, 1.0]] * 4))


def test_works_that_nobody_keeps_complete():
    run_ranks(_dropped, 2, backend="host")


def _futures(group):
    names = []

    def double(future):
        names.append(threading.current_thread().name)
        return future.value()[0] * 2

    tensor = torch.ones(300_000)
    work = group.allreduce([tensor])
    future = work.get_future()
    doubled = future.then(double)
    assert work.get_future() is future
    assert torch.equal(doubled.wait(), torch.full((300_000,), 4.0))
    assert future.done()
    assert torch.equal(work.result()[0], tensor)
    chain = group.broadcast([tensor]).get_future().then(lambda f: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        chain.wait()
    assert work.is_success()
    assert isinstance(group.allreduce([tensor], dist.AllreduceOptions(asyncOp=False)), CompletedWork)


def test_futures_and_their_callbacks():
    run_ranks(_futures, 2, backend="host")


def _synchronous_with_gaps(group):
    """A synchronous operation is done when it returns, also where its tensor is copied back."""
    for tensor in (torch.full((4, 2), group.rank() + 1.0), torch.full((400_000, 2), group.rank() + 1.0)):
        group.allreduce([tensor[:, 0]], dist.AllreduceOptions(asyncOp=False))
        assert tensor[:, 0].unique().tolist() == [3.0]
        assert tensor[:, 1].unique().tolist() == [group.rank() + 1.0]


def test_a_synchronous_operation_is_done_when_it_returns():
    run_ranks(_synchronous_with_gaps, 2, backend="host")


def _asynchronous(rank, size):
    """An asynchronous operation returns before the other rank has begun it, by the fast path and without."""
    store = current_store()
    for number, tensor in enumerate((torch.ones(2), torch.ones(4, 2)[:, 0])):
        if rank:
            store.wait([f"issued {number}"])
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            store.set(f"issued {number}", "")
        work.wait()
        assert tensor.unique().tolist() == [2.0]


def test_an_asynchronous_operation_does_not_wait_for_others():
    run_world(_asynchronous, 2)


def _threads(group):
    """Different threads issue; a lock keeps the order alike on all ranks only where it must be: per group."""
    size = group.size()
    failures = []

    def exchange(i):
        try:
            peer = 1 - group.rank()
            received = torch.empty(5000)
            sent = torch.full((5000,), float(i))
            work = group.send([sent], peer, i)
            group.recv([received], peer, i).wait()
            work.wait()
            assert (received == i).all()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=exchange, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for i in range(50):
        tensor = torch.full((20_000,), float(i))
        group.allreduce([tensor], dist.AllreduceOptions(asyncOp=bool(i % 2))).wait()
        assert (tensor == size * i).all()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_messages_of_many_threads_beside_collectives():
    run_ranks(_threads, 2, backend="host")


def _messages(group):
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in COUNTS:
        mine, other = _ramp(count, rank), torch.full((count,), -1.0)
        sending = group.send([mine], after, 7)  # everyone sends first
        receiving = group.recv([other], before, 7)
        receiving.wait()
        sending.wait()
        assert torch.equal(other, _ramp(count, before))
        assert receiving.source_rank() == before
        receiving = group.recv([other.fill_(-1)], before, 2**31 - 1)  # everyone receives first
        sending = group.send([mine], after, 2**31 - 1)
        sending.wait()
        receiving.wait()
        assert torch.equal(other, _ramp(count, before))
        # Tags are received against the order of sending, and equal tags in it.
        sends = [group.send([_ramp(count, tag + 100 * i)], after, tag) for tag in range(5) for i in range(2)]
        others = {(tag, i): torch.empty(count) for tag in range(5) for i in range(2)}
        receives = [group.recv([others[tag, i]], before, tag) for tag in reversed(range(5)) for i in range(2)]
        for work in receives + sends:
            work.wait()
        for (tag, i), tensor in others.items():
            assert torch.equal(tensor, _ramp(count, tag + 100 * i)), (count, tag, i)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_match_by_tag_and_in_order(size):
    run_ranks(_messages, size, backend="host")


def _any_source(group):
    rank, size = group.rank(), group.size()
    if rank != 0:
        group.send([torch.full((rank,), float(rank))], 0, rank % 2).wait()
        group.send([torch.full((9,), float(rank))], 0, 5).wait()
        return
    sources = set()
    for _ in range(size - 1):
        tensor = torch.empty(9)
        work = group.recv_anysource([tensor], 5)
        work.wait()
        assert (tensor == work.source_rank()).all()
        sources.add(work.source_rank())
    assert sources == set(range(1, size))
    for r in range(1, size):
        tensor = torch.empty(r)
        group.recv([tensor], r, r % 2).wait()
        assert (tensor == r).all()


def test_receive_from_any_rank():
    run_ranks(_any_source, 4, backend="host")


def _wrong_size(group):
    if group.rank() == 0:
        group.send([torch.arange(6.0)], 1).wait()
        group.send([torch.arange(5)], 1).wait()
        group.send([torch.arange(6.0)], 1).wait()
    else:
        with pytest.raises(dist.CollectiveMismatchError, match=r"20 bytes.*24 bytes"):
            group.recv([torch.empty(5)], 0).wait()
        with pytest.raises(dist.CollectiveMismatchError, match=r"float64.*int64"):
            group.recv([torch.empty(5, dtype=torch.float64)], 0).wait()
        tensor = torch.empty(6)
        group.recv([tensor], 0).wait()
        assert torch.equal(tensor, torch.arange(6.0))
    group.barrier().wait()


def test_message_of_another_size_or_type_is_an_error_of_the_receiver():
    run_ranks(_wrong_size, 2, backend="host")


def _late_receive(group):
    """A message in the ring outlives its sender's group."""
    if group.rank() == 0:
        group.send([torch.arange(6.0)], 1).wait()
        group.shutdown()
    else:
        time.sleep(0.3)
        tensor = torch.empty(6)
        group.recv([tensor], 0).wait()
        assert torch.equal(tensor, torch.arange(6.0))
        with pytest.raises(dist.PeerLostError, match="left the group") as caught:
            group.recv([tensor], 0).wait()
        assert caught.value.rank == 0


def test_message_of_a_rank_that_has_left_arrives():
    run_ranks(_late_receive, 2, backend="host")


def _timeouts_of_messages(group):
    group.set_timeout(timedelta(seconds=0.3))
    if group.rank() == 1:
        begin = time.monotonic()
        with pytest.raises(dist.CollectiveTimeoutError, match=r"receive of 4 bytes.*rank 0, tag 9"):
            group.recv([torch.empty(1)], 0, 9).wait()
        assert time.monotonic() - begin > 0.2
    group.set_timeout(timedelta(seconds=30))
    group.barrier().wait()  # the group is as good as before
    if group.rank() == 0:
        group.send([torch.ones(1)], 1, 9).wait()
    else:
        tensor = torch.zeros(1)
        group.recv([tensor], 0, 9).wait()
        assert tensor.item() == 1


def test_receive_that_times_out_leaves_the_group_usable():
    run_ranks(_timeouts_of_messages, 2, backend="host")


def _noise(count, highest, seed):
    return torch.randint(
        0, highest, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def _every_dtype(group):
    rank, size = group.rank(), group.size()
    for dtype in sorted(group.capabilities.moves, key=str):
        if str(dtype).startswith("torch.q"):
            continue
        element = torch.empty((), dtype=dtype).element_size()
        highest = 2 if dtype is torch.bool else 256
        for count in (3, 70_001):
            raw = [_noise(count * element, highest, r) for r in range(size)]
            mine = raw[rank].view(dtype)
            outputs = [torch.empty_like(mine) for _ in range(size)]
            group.allgather([outputs], [mine]).wait()
            for r, output in enumerate(outputs):
                assert torch.equal(output.view(torch.uint8), raw[r]), dtype
    quantized = torch.quantize_per_tensor(torch.full((5,), float(rank)), 0.5, 0, torch.qint8)
    outputs = [torch.empty_like(quantized) for _ in range(size)]
    group.allgather([outputs], [quantized]).wait()
    for r, output in enumerate(outputs):
        assert torch.equal(output.int_repr(), torch.full((5,), 2 * r, dtype=torch.int8))


def test_every_data_type_moves():
    run_ranks(_every_dtype, 2, backend="host")


def _same_bits(group):
    """The bits of an element depend on the ranks' values alone: not on size, offset, path or splitting."""
    rank = group.rank()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(rank)
        values = (torch.randn(150_001, generator=generator) * 100).to(dtype)
        whole = values.clone()
        group.allreduce([whole]).wait()
        for length, offset in ((1, 5), (40, 3), (5001, 1), (70_001, 13)):
            storage = torch.empty(length + 3, dtype=dtype)
            part = storage[3:]
            part.copy_(values[offset : offset + length])
            group.allreduce([part]).wait()
            assert torch.equal(part.view(torch.uint8), whole[offset : offset + length].view(torch.uint8))
        parts = list(values.split(50_001))
        outputs = (
            torch.empty_like(parts[0]) if rank < 2 else torch.empty(values.numel() - 100_002, dtype=dtype)
        )
        group.reduce_scatter([outputs], [parts]).wait()
        begin = 50_001 * rank
        assert torch.equal(
            outputs.view(torch.uint8), whole[begin : begin + outputs.numel()].view(torch.uint8)
        )


def test_same_bits_on_every_path():
    run_ranks(_same_bits, 3, backend="host")


def _late(group):
    """Returns the processor's time that this rank spends while it waits a second for rank 0."""
    rank, tensor = group.rank(), torch.ones(1000)
    spent = {}
    for asynchronous in (False, True):
        options = dist.AllreduceOptions(asyncOp=asynchronous)
        group.allreduce([tensor], options).wait()
        if rank == 0:
            time.sleep(1)
        begin = time.process_time()
        group.allreduce([tensor], options).wait()
        spent[asynchronous] = time.process_time() - begin
    return spent


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.sampled(1)
def test_ranks_that_wait_leave_the_cores_to_others(ranks):
    waiters = run_ranks(_late, ranks, backend="host")[1:]
    assert all(seconds < 0.1 for spent in waiters for seconds in spent.values()), waiters
