"""Dispatch modes of torch see the operations of our groups, and may answer them, as with its own backends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch_calls import every_function
from torch_systems.small import net
from torch_world import run_torch


class Onlooker(TorchDispatchMode):
    """Notes the operators of ``c10d``, with the reductions and roots that come with them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append((str(func), [one for one in args if type(one) in (int, bool)]))
        return func(*args, **(kwargs or {}))


def watched(rank, size):
    plain = every_function(rank, size)
    with Onlooker() as outer, Onlooker() as inner:
        found = every_function(rank, size)
    assert outer.seen == inner.seen
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    every_function(rank, size)
    return outer.seen


def test_modes_see_what_they_see_of_gloo():
    assert run_torch(watched, 2) == run_torch(watched, 2, backend="gloo")


def trained_by_ddp(rank, size):
    from torch.distributed.tensor.debug import CommDebugMode  # takes seconds to load

    model = DistributedDataParallel(net())
    with CommDebugMode() as mode:
        model(torch.ones(3, 4)).square().sum().backward()
        with dist._coalescing_manager():
            for _ in range(2):
                dist.all_reduce(torch.ones(2))
        parts = [torch.zeros(1) for _ in range(2)]
        with dist._coalescing_manager():
            for part in parts:
                dist.reduce_scatter_tensor(part, torch.arange(2.0))
        rows = [torch.zeros(2) for _ in range(2)]
        with dist._coalescing_manager():
            for row in rows:
                dist.all_gather_into_tensor(row, torch.ones(1))
        dist.barrier()
        assert parts == [torch.tensor([2.0 * rank])] * 2
        assert all(row.tolist() == [1.0, 1.0] for row in rows)
    return {str(kind): count for kind, count in mode.get_comm_counts().items()}


def factors_and_limits(rank, size):
    """What an operator does not carry arrives all the same."""
    one = torch.ones(2)
    with Onlooker() as mode:
        dist.all_reduce(one, op=dist._make_nccl_premul_sum(3.0))
        assert one.tolist() == [3.0 * size] * 2
        with pytest.raises(ValueError, match="output has 3 elements"):
            dist.all_gather_into_tensor(torch.empty(3), one)
        work = dist.all_reduce(one, async_op=True)
        assert work.wait()
        assert work.is_completed()
        assert one.tolist() == [3.0 * size * size] * 2
    assert mode.seen


def faked(rank, size):
    """A fake tensor has no memory: it must not be communicated."""
    world, add = dist.group.WORLD, torch.classes.c10d.ReduceOp()
    with FakeTensorMode():
        tensor, rows = torch.ones(3), torch.empty(3 * size)
        if rank == 0:  # nobody waits for the others
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(rows, tensor)
            outputs, _ = torch.ops.c10d.allreduce_([tensor], world.boxed(), add, None)
            assert outputs[0].shape == (3,)
            result = torch.ops._c10d_functional.all_gather_into_tensor(tensor, size, world.group_name)
            assert result.shape == (3 * size,)
    assert world._get_sequence_number_for_group() == 0
    dist.barrier()
    return tuple(rows.shape)


def test_data_parallel_is_counted():
    assert run_torch(trained_by_ddp, 2) == run_torch(trained_by_ddp, 2, backend="gloo")


def test_factors_and_limits():
    run_torch(factors_and_limits, 2)


def test_fake_tensors_are_not_communicated():
    assert run_torch(faked, 2) == [(6,), (6,)]
