"""The kernels are torch's own again when the last group of ours has ended."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch_world import BACKEND, run_torch

from collectives.torch_bridge import operators as kernels

OPERATORS = ["c10d::allreduce_", "c10d::gather_", "c10d::barrier"]
if hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):  # not yet in torch 2.11
    OPERATORS.append("_c10d_functional::batch_p2p_ops")


def ours_are_there():
    found = {"operators.py" in torch._C._dispatch_dump(operator) for operator in OPERATORS}
    assert len(found) == 1
    return found.pop()


def comes_and_goes(rank, size):
    assert not ours_are_there()
    first, second = (dist.new_group(backend=BACKEND) for _ in range(2))
    assert ours_are_there()
    dist.destroy_process_group(first)
    assert ours_are_there()
    first.shutdown()
    assert ours_are_there()
    tensor = torch.ones(1)
    work = torch.ops.c10d.allreduce_([tensor], second.boxed(), torch.classes.c10d.ReduceOp(), None)[1]
    dist.Work.unbox(work).wait()
    assert tensor.item() == size
    third = dist.new_group(backend=BACKEND)
    second.abort()
    assert ours_are_there()
    del first, second
    dist.destroy_process_group(third)
    assert not ours_are_there()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    again = dist.new_group(backend=BACKEND)
    assert ours_are_there()
    work = torch.ops.c10d.allreduce_([tensor], again.boxed(), torch.classes.c10d.ReduceOp(), None)[1]
    dist.Work.unbox(work).wait()
    assert tensor.item() == size * size
    dist.destroy_process_group()
    again = None
    gc.collect()
    assert not ours_are_there()


@pytest.mark.skipif(kernels.can_be_made(), reason="this torch takes a Backend of Python instead")
def test_kernels_come_and_go():
    run_torch(comes_and_goes, backend="gloo")


def ends_with_a_failure(rank, size, how):
    group = dist.new_group(backend=BACKEND)
    assert ours_are_there()

    def fail():
        raise RuntimeError("cannot end")

    setattr(group.inner, how, fail)
    with pytest.raises(RuntimeError, match="cannot end"):
        getattr(group, how)()
    assert not ours_are_there()
    delattr(group.inner, how)  # the end of the world ends it again


@pytest.mark.skipif(kernels.can_be_made(), reason="this torch takes a Backend of Python instead")
@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_kernels_go_where_the_end_of_a_group_fails(how):
    run_torch(ends_with_a_failure, 2, how, backend="gloo", isolated=True)
