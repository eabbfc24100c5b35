"""The host backend by itself: order, independence of the GIL and of late ranks, wrong and late messages."""

from __future__ import annotations

import ctypes
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


def asks_for_a_future_in_a_listener(group):
    """What is told of the first error may be the user's, and ask for futures itself."""
    group.set_timeout(timedelta(seconds=0.2))
    late, other = group.recv([torch.empty(1)], 0, 0), group.recv([torch.empty(1)], 0, 1)
    group._at_first_error(lambda _: other.get_future())
    while not late.is_completed():
        time.sleep(0.01)
    with pytest.raises(dist.CollectiveTimeoutError):
        late.get_future().wait()


def test_a_listener_of_errors_may_ask_for_futures():
    run_ranks(asks_for_a_future_in_a_listener, 1, backend="host", isolated=True, timeout=30)


def in_a_file_of_another_encoding(group):
    """Its name is no UTF-8, and stands where errors and dumps tell who issued an operation."""
    source = "def issue(group, tensor):\n    return group.allreduce([tensor])\n"
    space = {}
    exec(compile(source, "/tmp/\udce9/x.py", "exec"), space)
    tensor = torch.ones(2)
    space["issue"](group, tensor).wait()
    if group.rank() == 1:
        time.sleep(0.4)  # the other one looks who waits, and where
    space["issue"](group, tensor).wait()
    assert tensor.tolist() == [4, 4]


def test_a_caller_in_a_file_whose_name_is_no_utf_8():
    run_ranks(in_a_file_of_another_encoding, 2, backend="host")
