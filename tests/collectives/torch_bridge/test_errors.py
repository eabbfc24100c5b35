"""Errors keep their classes on every way to the caller: call, wait(), futures, backward()."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_world import run_torch

from collectives.errors import (
    CollectiveMismatchError,
    DistBackendError,
    GroupAbortedError,
    PeerLostError,
)


def usable(rank, size):
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(size))] * 3


def mismatch(rank, size):
    wrong = torch.ones(3 + rank)
    with pytest.raises(CollectiveMismatchError, match="rank 1") as raised:
        dist.all_reduce(wrong)
    assert isinstance(raised.value, dist.DistBackendError)
    assert torch.equal(wrong, torch.ones(3 + rank))
    usable(rank, size)
    work = dist.all_reduce(wrong, async_op=True)
    with pytest.raises(CollectiveMismatchError):
        work.wait()
    with pytest.raises(CollectiveMismatchError):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), CollectiveMismatchError)
    usable(rank, size)
    future = dist.all_reduce(wrong, async_op=True).get_future()
    with pytest.raises(CollectiveMismatchError):
        future.wait()
    assert dist.all_reduce(wrong, async_op=True).get_future_result().wait() == 100
    usable(rank, size)


def mismatch_through_cpp(rank, size):
    wrong, world = torch.ones(3 + rank), dist.group.WORLD
    result = torch.ops._c10d_functional.all_reduce(wrong, "sum", world.group_name)
    with pytest.raises(CollectiveMismatchError):
        torch.ops._c10d_functional.wait_tensor(result)
    with pytest.raises(CollectiveMismatchError):
        dist.ProcessGroup.allreduce(world, [wrong]).wait()
    with pytest.raises(CollectiveMismatchError):
        dist.ProcessGroup.gather(world, [[wrong, wrong.clone()]] if rank == 0 else [], [wrong]).wait()
    boxed, add = world.boxed(), torch.classes.c10d.ReduceOp()
    with pytest.raises(CollectiveMismatchError):
        dist.Work.unbox(torch.ops.c10d.allreduce_([wrong], boxed, add, None)[1]).wait()
    usable(rank, size)


def mismatch_in_backward(rank, size):
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    loss = model(torch.ones(1, 4)).sum()
    if rank == 0:
        with pytest.raises(RuntimeError, match="CollectiveMismatchError"):
            loss.backward()
    else:
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(torch.ones(1))
    usable(rank, size)
    if rank == 0:  # the reducer counts on nothing of the failed step
        model = None
    fresh = DistributedDataParallel(torch.nn.Linear(4, 2))
    fresh(torch.ones(1, 4) * rank).sum().backward()
    assert fresh.module.weight.grad.tolist() == [[0.5] * 4] * 2


def mismatch_in_a_hook(rank, size):
    def hook(_, bucket):
        wrong = torch.ones(3 + rank)
        return dist.all_reduce(wrong, async_op=True).get_future().then(lambda done: done.value()[0])

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="CollectiveMismatchError"):
        model(torch.ones(1, 4)).sum().backward()
    usable(rank, size)


def raising_hook(rank, size):
    """What the call itself raises keeps its class through C++."""

    def hook(_, bucket):
        dist.group.WORLD.broadcast(bucket.buffer(), root=size)

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="root"):
        model(torch.ones(1, 4)).sum().backward()
    usable(rank, size)


def destroyed(rank, size):
    world = dist.group.WORLD
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    dist.destroy_process_group()
    with pytest.raises(DistBackendError):
        world.allreduce(torch.ones(1)).wait()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        mismatch,
        mismatch_through_cpp,
        mismatch_in_backward,
        mismatch_in_a_hook,
        raising_hook,
        destroyed,
    ],
    ids=lambda body: body.__name__,
)
def test_error(body):
    run_torch(body)


def aborted(rank, size):
    world = dist.group.WORLD
    if rank == 0:
        threading.Timer(0.2, world.abort).start()
        with pytest.raises(GroupAbortedError):
            dist.all_reduce(torch.ones(1))
        with pytest.raises(GroupAbortedError):
            world.barrier().wait()
        world.get_group_store().set("aborted", "1")
    else:
        world.get_group_store().wait(["aborted"], timedelta(seconds=20))
        with pytest.raises(DistBackendError):
            dist.all_reduce(torch.ones(1))
    world.abort()


def test_abort():
    run_torch(aborted, isolated=True)


def killed(rank, size):
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="PeerLostError"):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(DistBackendError) as raised:
        dist.all_reduce(torch.ones(1))
    assert isinstance(raised.value, (PeerLostError, GroupAbortedError))
    dist.group.WORLD.abort()
    return "survived"


def test_killed_rank():
    assert run_torch(killed, isolated=True, lost=[1])[0] == "survived"
