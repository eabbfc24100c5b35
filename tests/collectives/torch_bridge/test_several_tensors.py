"""Several tensors of one rank in one call through torch, also one that is given twice."""

from __future__ import annotations

import warnings

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


def several_sparse_tensors(rank, size):
    def mine(number):
        return torch.sparse_coo_tensor([[rank, 3]], [1.0, number], (4,), check_invariants=True)

    tensors = [mine(1.0), mine(2.0)]
    work = dist.group.WORLD.allreduce(tensors)
    work.wait()
    assert [tensor.to_dense().tolist() for tensor in tensors] == [[2.0, 2.0, 0.0, 6.0]] * 2
    assert work.result()[1] is tensors[1]
    for wrong, words in (
        ([mine(1.0), torch.ones(4)], "all sparse, or none"),
        ([mine(1.0), mine(1.0).double()], "one data type"),
        ([tensors[0], tensors[0]], "share memory"),
    ):
        with pytest.raises(ValueError, match=words):
            dist.group.WORLD.allreduce(wrong)


def test_several_sparse_tensors_in_one_all_reduce_as_on_gloo():
    run_torch(several_sparse_tensors, 2)


def several_of_other_operations(rank, size):
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 2
    tensors = [torch.tensor([10.0 * rank + place]) for place in range(3)]
    work = dist.group.WORLD.broadcast(tensors, options)
    work.wait()
    assert [tensor.item() for tensor in tensors] == [12.0] * 3
    assert work.result()[0] is tensors[0]
    options.rootTensor = 3
    with pytest.raises(ValueError, match=r"rootTensor is 3, but there are 3 tensors"):
        dist.group.WORLD.broadcast(tensors, options)
    inputs = [torch.tensor([[10.0 * rank + place] * 2]) for place in range(3)]
    outputs = [[torch.empty(1, 2) for _ in range(3 * size)] for _ in inputs]
    work = dist.group.WORLD.allgather(outputs, inputs)
    values = work.get_future().wait()
    assert work.result()[2][5] is outputs[2][5]
    assert [len(entry) for entry in values] == [6, 6, 6]
    for entry in [*outputs, *values]:
        assert [tensor.tolist() for tensor in entry] == [[[x, x]] for x in (0.0, 1.0, 2.0, 10.0, 11.0, 12.0)]
    for wrong in (outputs[:2], [entry[1:] for entry in outputs]):
        with pytest.raises(
            ValueError, match=r"needs 3 lists of 6 tensors, as there are 3 inputs and 2 ranks"
        ):
            dist.group.WORLD.allgather(wrong, inputs)
    dist.barrier()


def test_several_tensors_in_one_broadcast_and_all_gather_as_on_gloo():
    run_torch(several_of_other_operations, 2)


def given_twice(rank, size):
    """Reduced once, as separate copies are; where what is written would be up to chance, refused."""
    tensor, whole = torch.full((4,), rank + 1.0), torch.empty(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # all_reduce_coalesced is to go
        dist.all_reduce_coalesced([tensor, tensor])
    assert tensor.tolist() == [3.0] * 4
    with dist._coalescing_manager():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [6.0] * 4
    dist.reduce_scatter(tensor, [tensor, tensor])
    assert tensor.tolist() == [12.0] * 4
    dist.scatter(tensor, [tensor, tensor] if rank == 0 else None)
    assert tensor.tolist() == [12.0] * 4

    def gather_in_a_batch():
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(whole, tensor)
            dist.all_gather_into_tensor(whole, tensor)

    for refused in (
        lambda: dist.all_gather([tensor, tensor], tensor),
        lambda: dist.all_to_all([tensor, tensor], [tensor, tensor]),
        gather_in_a_batch,
    ):
        with pytest.raises(ValueError, match="share memory"):
            refused()
    dist.barrier()


@pytest.mark.parametrize("backend", ["collectives", "collectives_round_robin", "collectives_gloo"])
def test_a_tensor_that_is_given_twice(backend):
    run_torch(given_twice, 2, backend=backend)


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
