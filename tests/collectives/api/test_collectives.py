"""The user functions on tensors beside values: barriers, ranks in arguments, reductions, wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_world

import collectives as dist


def filled(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (3,), float(value))


def barriers(rank: int, size: int) -> None:
    assert dist.barrier() is None
    dist.barrier(timeout=timedelta(seconds=5))
    dist.monitored_barrier()
    assert isinstance(dist.barrier(async_op=True), dist.Work)


def test_barriers() -> None:
    run_world(barriers, 3)


def ranks_of_a_part(rank: int, size: int) -> None:
    """The group's ranks 0 and 1 are the global ranks 1 and 3."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    for arguments in ({"src": 3}, {"group_src": 1}):
        tensor = filled(rank)
        dist.broadcast(tensor, group=group, **arguments)
        assert tensor.tolist() == [3] * 3
    for arguments in ({"dst": 3}, {"group_dst": 1}):
        tensor = filled(rank)
        dist.reduce(tensor, group=group, **arguments)
        assert tensor.tolist() == [4 if rank == 3 else 1] * 3
        parts = [torch.empty(3) for _ in range(2)] if rank == 3 else None
        dist.gather(filled(rank), parts, group=group, **arguments)
        assert rank == 1 or [part[0].item() for part in parts] == [1, 3]
    for arguments in ({"src": 3}, {"group_src": 1}):
        tensor = torch.empty(3)
        dist.scatter(tensor, [filled(5), filled(6)] if rank == 3 else None, group=group, **arguments)
        assert tensor.tolist() == [5 if rank == 1 else 6] * 3
    refused: list[tuple[Callable[..., Any], str, dict[str, int], str]] = [
        (
            dist.broadcast,
            "src",
            {"src": 0},
            r"src is global rank 0, but the group has the global ranks \[1, 3\]",
        ),
        (
            dist.broadcast,
            "src",
            {"src": 1, "group_src": 0},
            r"give src or group_src, not both \(src=1, group_src=0\)",
        ),
        (dist.broadcast, "src", {}, "give src or group_src"),
        (dist.broadcast, "src", {"group_src": 2}, "root is 2, but the ranks of this group are 0 to 1"),
        (dist.reduce, "dst", {"dst": 2}, "dst is global rank 2"),
        (dist.reduce, "dst", {"group_dst": -1}, "root is -1"),
        # Rank 0 of the default group, the default, is not in this one.
        (dist.gather, "dst", {}, "dst is global rank 0"),
        (dist.scatter, "src", {}, "src is global rank 0"),
    ]
    for function, _, arguments, reason in refused:
        with pytest.raises(ValueError, match=reason) as caught:
            function(filled(1), group=group, **arguments)
        assert f"[rank {group.rank()}]" in str(caught.value)
    tensor = filled(rank)
    dist.all_reduce(tensor, group=group)  # nothing was sent
    assert tensor.tolist() == [4] * 3


def test_ranks_in_arguments_are_global() -> None:
    run_world(ranks_of_a_part, 4)


def outside_autograd(rank: int, size: int) -> None:
    weight = torch.nn.Parameter(filled(rank + 1))
    before = weight._version
    dist.all_reduce(weight)
    assert weight.is_leaf
    assert weight.tolist() == [3] * 3
    assert weight._version >= before
    product = weight * 2
    dist.broadcast(product, 0)
    product.sum().backward()
    assert weight.grad.tolist() == [2] * 3


def test_no_part_in_autograd() -> None:
    run_world(outside_autograd, 2)


def wrong_calls(rank: int, size: int) -> None:
    one, two = filled(1, 1), filled(1, 2)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: dist.all_gather(one, one), TypeError, "tensor_list must be a list of tensors, but is of"),
        (lambda: dist.all_gather([one, 3], one), TypeError, r"tensor_list\[1\] must be a tensor, but is of"),
        (lambda: dist.barrier(device_ids=0), TypeError, "device_ids must be a list of one int, but is 0"),
        (lambda: dist.barrier(device_ids=[0, 1]), TypeError, "device_ids must be a list of one int"),
        (lambda: dist.monitored_barrier(timeout=timedelta(0)), ValueError, "timeout must be positive"),
    ]
    if rank == 0:
        cases += [
            (lambda: dist.gather(one), ValueError, "this rank is the root and must give gather_list"),
            (
                lambda: dist.gather(one, [one]),
                ValueError,
                "gather_list must hold one tensor for each of 2 ranks",
            ),
            (lambda: dist.gather(one, two), TypeError, "gather_list must be a list of tensors, but is"),
            (lambda: dist.scatter(one, [one, two]), ValueError, "entry 1 .* has 2 elements .* not 1"),
        ]
    else:
        cases += [
            (
                lambda: dist.gather(one, [one, one]),
                ValueError,
                "gather_list is for the root, rank 0 of the group",
            ),
            (
                lambda: dist.scatter(one, two),
                ValueError,
                "scatter_list is for the root, rank 0 of the group",
            ),
        ]
    for number, (call, kind, reason) in enumerate(cases):
        with pytest.raises(kind, match=reason) as caught:
            call()
        assert str(caught.value).startswith(f"[rank {rank}]"), (number, caught.value)
    # Nothing was sent: the group goes on.
    tensor = filled(rank)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1] * 3


def test_wrong_arguments_end_before_anything_is_sent() -> None:
    run_world(wrong_calls, 2)


class Labelled(torch.Tensor):
    """A subclass with memory."""


def stand_ins(rank: int, size: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    with FakeTensorMode():
        fake = torch.ones(3)
    pair = TwoTensor(torch.ones(3), torch.ones(3))
    calls: list[Callable[[torch.Tensor], Any]] = [
        dist.all_reduce,
        lambda tensor: dist.broadcast(tensor, 0),
        lambda tensor: dist.all_gather([filled(1), tensor], filled(1)),
        lambda tensor: dist.all_gather_single(torch.empty(6), tensor),
        lambda tensor: dist.isend(tensor, 1 - rank),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="is a FakeTensor without memory of its own"):
            call(fake)
        with pytest.raises(TypeError, match="is a TwoTensor without memory of its own"):
            call(pair)

        def within(tensor: torch.Tensor, call: Callable[[torch.Tensor], Any] = call) -> torch.Tensor:
            with pytest.raises(TypeError, match="is a Tensor without memory of its own"):
                call(tensor)
            return tensor.sum()

        torch.func.functionalize(within)(torch.ones(3))
        torch.func.grad(within)(torch.ones(3))
        torch.vmap(within)(torch.ones(2, 3))
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match="is a Tensor without memory of its own"):
            call(freed)
    labelled = filled(rank).as_subclass(Labelled)
    dist.all_reduce(labelled)
    assert labelled.tolist() == [1] * 3


def test_tensors_without_memory_are_refused() -> None:
    run_world(stand_ins, 2)


def takes_torch_reductions(rank: int, size: int) -> None:
    tensor = filled(rank + 1)
    dist.all_reduce(tensor, torch.distributed.ReduceOp.PRODUCT)
    assert tensor.tolist() == [2] * 3
    dist.all_reduce(tensor, dist.make_premul_sum(0.5))
    assert tensor.tolist() == [2] * 3
    dist.all_reduce(tensor.fill_(rank), dist.ReduceOp.AVG)
    assert tensor.tolist() == [0.5] * 3


def test_reductions_of_torch_and_of_factors() -> None:
    run_world(takes_torch_reductions, 2)


def test_reductions_are_made_as_in_torch() -> None:
    """``ReduceOp(ReduceOp.SUM)``, ``ReduceOp.RedOpType`` and its values."""
    made = dist.ReduceOp
    for name, kind in torch.distributed.ReduceOp.RedOpType.__members__.items():
        member = getattr(made, name)
        assert member == made(member) == made(kind) == kind
        assert isinstance(member, made.RedOpType)
        assert made.RedOpType(int(kind)) == getattr(made.RedOpType, name) == member
        assert (member.name, member.value, int(member)) == (name, kind.value, int(kind))
        assert {made.RedOpType.__members__[name]: 1}[member] == 1
    assert dist.ReduceOp("SUM") == dist.ReduceOp(torch.distributed.ReduceOp.SUM) == dist.ReduceOp.SUM
    halved = dist.make_premul_sum(0.5)
    assert dist.ReduceOp(halved) == halved != dist.ReduceOp.PREMUL_SUM
    assert dist.ReduceOp(halved, 2.0).factor == 2.0
    with pytest.raises(ValueError, match="unknown reduction 'sum'; the reductions are SUM"):
        dist.ReduceOp("sum")
    with pytest.raises(ValueError, match="unknown reduction 9"):
        dist.ReduceOp(9)
    with pytest.raises(TypeError, match="op must be a ReduceOp"):
        dist.ReduceOp(None)


def wrong_layouts_and_memory(rank: int, size: int) -> None:
    """On one rank, which keeps its turn; all ranks go on together."""
    dense, sparse, freed = torch.ones(2), torch.ones(2).to_sparse(), torch.ones(3)
    freed.untyped_storage().resize_(0)
    if rank == 0:
        with pytest.raises(ValueError, match=r"must have one layout, but entry 0 is torch.strided and 2"):
            dist.reduce_scatter(torch.empty(2), [dense, sparse])
        with pytest.raises(ValueError, match="must have one layout"):
            dist.all_to_all([dense.clone(), dense.clone()], [dense, sparse])
        with pytest.raises(ValueError, match=r"output is torch.strided, but input is torch.sparse_coo"):
            dist.reduce_scatter_single(torch.empty(1), sparse)
        with pytest.raises(dist.UnsupportedOperationError, match=r"layout torch.sparse_coo are not taken"):
            dist.all_reduce_into_tensor(sparse.clone(), sparse)
        with pytest.raises(TypeError, match="without memory of its own"):
            dist.group.WORLD.allreduce_coalesced([freed])
    given = torch.ones(2)
    dist.group.WORLD.allreduce_coalesced(one for one in [given]).wait()
    assert given.tolist() == [size] * 2
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [size] * 2


@pytest.mark.parametrize("backend", ["host", "gloo", "round_robin"])
def test_wrong_layouts_and_memory(backend: str) -> None:
    run_world(wrong_layouts_and_memory, 2, backend=backend)


def splits_of_other_types(rank: int, size: int) -> None:
    output = torch.empty(2)
    with pytest.raises(TypeError, match=r"split sizes of input must be a list of int, but are \[1.0, 1.0\]"):
        dist.all_to_all_single(output, torch.ones(2), [1.0, 1.0], [1.0, 1.0])  # type: ignore[list-item]
    splits = [np.int64(1)] * 2 if rank == 0 else [1, 1]
    dist.all_to_all_single(output, torch.ones(2), splits, splits)
    assert output.tolist() == [1, 1]


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_splits_of_other_types(level: str) -> None:
    run_world(splits_of_other_types, 2, env={"TORCH_DISTRIBUTED_DEBUG": level})
