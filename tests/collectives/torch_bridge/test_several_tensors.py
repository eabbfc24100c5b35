"""Several tensors of one rank in one all-reduce through torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch_world import run_torch

from collectives.errors import UnsupportedOperationError


def several_tensors(rank, size):
    for op, expected in ((dist.ReduceOp.SUM, 10.0), (dist.ReduceOp.MAX, 4.0), (dist.ReduceOp.PRODUCT, 24.0)):
        tensors = [torch.full((3,), 2.0 * rank + 1), torch.full((3,), 2.0 * rank + 2)]
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work = dist.group.WORLD.allreduce(tensors, options)
        work.wait()
        assert [tensor.tolist() for tensor in tensors] == [[expected] * 3] * 2
        assert work.result()[1] is tensors[1]
    for wrong, words in (
        ([torch.ones(2), torch.ones(3)], "one shape"),
        ([torch.ones(2), torch.ones(2).double()], "one data type"),
        ([tensors[0], tensors[0]], "share memory"),
    ):
        with pytest.raises(ValueError, match=words):
            dist.group.WORLD.allreduce(wrong)
    with pytest.raises(TypeError, match=r"tensors\[1\]"):
        dist.group.WORLD.allreduce([torch.ones(2), 3])
    options.reduceOp = dist.ReduceOp.AVG
    with pytest.raises(UnsupportedOperationError, match="AVG takes one tensor in a call, but there are 2"):
        dist.group.WORLD.allreduce(tensors, options)


def test_several_tensors_in_one_all_reduce_as_on_gloo():
    run_torch(several_tensors, 2)


def sums_of_narrow_floats(rank, size):
    """Each addend but the first is lost where a sum is rounded before the last rank's is added."""
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32):
        large = 2 / torch.finfo(dtype).eps
        tensors = [torch.tensor([x]).to(dtype) for x in ((large, 1.0) if rank == 0 else (0.0, 1.0))]
        dist.group.WORLD.allreduce(tensors).wait()
        for tensor in tensors:
            assert tensor.dtype is dtype
            assert tensor.item() == large + size


def test_a_sum_of_narrow_floats_is_rounded_once():
    run_torch(sums_of_narrow_floats, 2)
