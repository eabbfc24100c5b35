"""All-reduce of sparse tensors on every route, torch's gradient reducer among them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_world import run_torch

from collectives.errors import CollectiveMismatchError, UnsupportedOperationError


def mine(rank, dtype=torch.float32, rows=10):
    """Rows 0 to rank, and one that all have twice."""
    indices = torch.tensor([*range(rank + 1), 7, 7])
    values = (torch.arange(len(indices) * 2).view(-1, 2) % 5 + rank).to(dtype)
    return torch.sparse_coo_tensor(indices[None], values, (rows, 2), check_invariants=True)


def equal(tensor, size, dtype=torch.float32):
    expected = sum(mine(r, dtype).to_dense() for r in range(size))
    assert tensor.is_sparse
    assert tensor.dtype is dtype
    assert torch.equal(tensor.to_dense(), expected)


def sums(rank, size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16):
        tensor = mine(rank, dtype)
        assert dist.all_reduce(tensor) is None
        equal(tensor, size, dtype)
    tensor = mine(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    equal(tensor, size)
    assert work.result()[0] is tensor
    tensor = mine(rank)
    equal(dist.all_reduce(tensor, async_op=True).get_future().wait()[0], size)
    tensor = mine(rank)
    dist.group.WORLD.allreduce(tensor, dist.ReduceOp.SUM).wait()
    equal(tensor, size)
    tensor = mine(rank)
    dist.ProcessGroup.allreduce(dist.group.WORLD, [tensor]).wait()
    equal(tensor, size)
    tensor, add = mine(rank), torch.classes.c10d.ReduceOp()
    boxed = torch.ops.c10d.allreduce_([tensor], dist.group.WORLD.boxed(), add, None)[1]
    dist.Work.unbox(boxed).wait()
    equal(tensor, size)
    empty = torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0), (3, 4), check_invariants=True)
    dist.all_reduce(empty)
    assert empty._nnz() == 0
    one_has_some = mine(rank) if rank == 0 else torch.zeros(10, 2).to_sparse(1)
    dist.all_reduce(one_has_some)
    assert torch.equal(one_has_some.to_dense(), mine(0).to_dense())
    with torch.profiler.profile() as recorded:
        dist.all_reduce(mine(rank))
    assert sum(event.name == "collectives:all_reduce" for event in recorded.events()) == 1


def refused(rank, size):
    with pytest.raises(UnsupportedOperationError, match="added up"):
        dist.all_reduce(mine(rank), dist.ReduceOp.MAX)
    with pytest.raises(UnsupportedOperationError, match="layout"):
        dist.all_reduce(torch.eye(2).to_sparse_csr())
    different = [mine(rank, rows=10 + rank), mine(rank, (torch.float32, torch.float64)[rank % 2])]
    for tensor in different:
        before = tensor.clone()
        with pytest.raises(CollectiveMismatchError, match="nothing was changed") as caught:
            dist.all_reduce(tensor)
        assert caught.value.operation == "all_reduce"
        assert torch.equal(tensor.to_dense(), before.to_dense())
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(mine(rank) if rank else torch.ones(2))
    tensor = mine(rank)
    dist.all_reduce(tensor)
    equal(tensor, size)


def indices_apart(rank, size):
    """The indices that torch 2.15 takes beside the values are refused, and not left out."""
    record = dist.AllreduceOptions()
    record.asyncOp = False
    had = hasattr(dist.AllreduceOptions, "sparseIndices")
    if had:
        record.sparseIndices = torch.tensor([[0]])
    else:
        dist.AllreduceOptions.sparseIndices = torch.tensor([[0]])
    try:
        with pytest.raises(UnsupportedOperationError, match="sparseIndices"):
            dist.group.WORLD.allreduce([mine(rank)], record)
        if had:
            with pytest.raises(UnsupportedOperationError, match="sparseIndices"):
                dist.group.WORLD.allreduce([torch.ones(2)], record)
    finally:
        if not had:
            del dist.AllreduceOptions.sparseIndices
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 2


def sparse_gradients(rank, size):
    torch.manual_seed(3)
    net = torch.nn.EmbeddingBag(12, 3, sparse=True, mode="sum")
    oracle = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    rows = torch.tensor([[r, r + 1, 9] for r in range(size)])
    for _ in range(3):
        for each, part in ((oracle, rows), (model, rows[rank : rank + 1])):
            each.zero_grad()
            each(part).sum().backward()
    assert net.weight.grad.is_sparse
    torch.testing.assert_close(net.weight.grad.to_dense() * size, oracle.weight.grad.to_dense())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "body", [sums, refused, indices_apart, sparse_gradients], ids=lambda body: body.__name__
)
def test_sparse(body, size):
    run_torch(body, size)
