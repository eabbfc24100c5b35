"""Sparse tensors in ``collectives.all_reduce``; the routes through torch are tested with the bridge."""

from __future__ import annotations

import pytest
import torch
from harness import run_world

import collectives as dist


def rows(rank):
    return torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.full((2, 2), rank + 1.0), (4, 2))


def sums(rank, size):
    expected = sum(rows(r).to_dense() for r in range(size))
    tensor = rows(rank)
    assert dist.all_reduce(tensor) is None
    assert torch.equal(tensor.to_dense(), expected)
    later = rows(rank)
    work = dist.all_reduce(later, async_op=True)
    assert work.wait()
    assert later.is_sparse
    assert torch.equal(later.to_dense(), expected)
    with pytest.raises(dist.UnsupportedOperationError, match="only be added up, but the reduction is MAX"):
        dist.all_reduce(rows(rank), dist.ReduceOp.MAX)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["host", "gloo", "round_robin"])
def test_all_reduce(backend) -> None:
    run_world(sums, 2, backend=backend)
