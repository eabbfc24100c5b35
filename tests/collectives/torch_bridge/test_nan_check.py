"""TORCH_DIST_NAN_CHECK: what a rank is to send must hold no NaN; what it receives into may."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch_world import run_torch

from collectives.errors import DistError

NAN = float("nan")


def bad(dtype=torch.float32, count=4):
    return torch.tensor([0.0] * (count - 1) + [NAN]).to(dtype)


def refusals(rank, size):
    """Every call is refused on both ranks, so that none waits for the other."""
    other, ok = 1 - rank, torch.ones(4)
    calls = {
        "all_reduce": lambda: dist.all_reduce(bad()),
        "all_reduce, async": lambda: dist.all_reduce(bad(torch.bfloat16), async_op=True),
        "all_reduce, coalesced": lambda: dist.all_reduce_coalesced([ok, bad(torch.complex64)]),
        "all_reduce, sparse": lambda: dist.all_reduce(bad().to_sparse()),
        "all_reduce, of C++": lambda: dist.ProcessGroup.allreduce(dist.group.WORLD, [bad()]),
        "all_reduce, functional": lambda: torch.ops._c10d_functional.all_reduce(
            bad(), "sum", dist.group.WORLD.group_name
        ),
        "reduce": lambda: dist.reduce(bad(torch.float64), 0),
        "all_gather": lambda: dist.all_gather([torch.empty(4), torch.empty(4)], bad()),
        "all_gather, one": lambda: dist.all_gather_into_tensor(torch.empty(8), bad()),
        "gather": lambda: dist.gather(bad(), [torch.empty(4), torch.empty(4)] if rank == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(4), [ok, bad()]),
        "reduce_scatter, one": lambda: dist.reduce_scatter_tensor(torch.empty(2), bad()),
        "all_to_all": lambda: dist.all_to_all([torch.empty(4), torch.empty(4)], [bad(), ok]),
        "all_to_all, one": lambda: dist.all_to_all_single(ok.to(torch.float8_e5m2), bad(torch.float8_e5m2)),
        "send": lambda: dist.send(bad(), other),
        "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, bad(), other)]),
    }
    told = {}
    for name, call in calls.items():
        with contextlib.suppress(DistError):
            call()
            told[name] = "went through"
    for root in range(size):
        if rank == root:
            with pytest.raises(DistError, match="NaN at element 3; nothing was sent"):
                dist.broadcast(bad(), root)
            with pytest.raises(DistError, match=rf"\[rank {rank}\] scatter"):
                dist.scatter(torch.empty(4), [ok, bad()], root)
    return told


def outputs_may_be_nan(rank, size):
    for root in range(size):
        tensor = torch.ones(4) if rank == root else bad()
        dist.broadcast(tensor, root)
        assert tensor.tolist() == [1.0] * 4
        tensor = bad()
        dist.scatter(tensor, [torch.ones(4), torch.ones(4)] if rank == root else None, root)
        assert tensor.tolist() == [1.0] * 4
    tensor = bad()
    receive = dist.irecv(tensor, 1 - rank)
    dist.send(torch.ones(4), 1 - rank)
    receive.wait()
    assert tensor.tolist() == [1.0] * 4
    numbers = torch.full((3,), rank)
    dist.all_reduce(numbers)
    assert numbers.tolist() == [1] * 3
    dist.barrier()


def both(rank, size):
    told = refusals(rank, size)
    outputs_may_be_nan(rank, size)  # nothing was sent before
    return told


def test_nan_is_not_sent():
    assert run_torch(both, env={"TORCH_DIST_NAN_CHECK": "1"}) == [{}, {}]


def unchecked(rank, size):
    tensor = bad()
    dist.all_reduce(tensor)
    return tensor.isnan().tolist()


def test_nan_is_sent_where_nobody_asks():
    assert run_torch(unchecked) == [[False, False, False, True]] * 2
