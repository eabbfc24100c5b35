"""Groups of ``torch.distributed`` in the place of this package's, for DDP and for the functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from torch_world import run_torch

import collectives
from collectives.ddp import DistributedDataParallel, SyncBatchNorm


def train(rank: int, size: int) -> list[float]:
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    normed = SyncBatchNorm(1)(torch.full((2, 1), float(rank)))
    return [model.module.weight.grad.item(), normed[0].item()]


def test_a_world_of_torch_on_our_backend_is_the_default() -> None:
    first, second = run_torch(train)
    assert first[0] == second[0] == 1.5
    assert first[1] == pytest.approx(-second[1])
    assert abs(first[1]) > 0.9


def reduce(rank: int, size: int) -> None:
    part = torch.distributed.new_group([0, 1])
    for group in (torch.distributed.group.WORLD, part):
        tensor = torch.full((2,), rank + 1.0)
        collectives.all_reduce(tensor, group=group)
        assert tensor.tolist() == [3.0, 3.0]
        collectives.broadcast(tensor, group_src=1, group=group)
        with collectives._coalescing_manager(group):
            collectives.all_reduce(tensor, group=group)
        assert tensor.tolist() == [6.0, 6.0]
        one, peer = torch.tensor([float(rank)]), 1 - rank
        got = torch.empty(1)
        for work in collectives.batch_isend_irecv(
            [
                collectives.P2POp(collectives.isend, one, group=group, group_peer=peer),
                collectives.P2POp(collectives.irecv, got, group=group, group_peer=peer),
            ]
        ):
            work.wait()
        assert got.item() == peer
        assert (collectives.get_rank(group), collectives.get_world_size(group)) == (rank, size)
        gathered = [None] * size
        collectives.all_gather_object(gathered, rank, group=group)
        assert gathered == [0, 1]


def test_functions_take_groups_of_torch_on_our_backend() -> None:
    run_torch(reduce)


def refused(rank: int, size: int) -> None:
    way_out = r'torch.distributed.init_process_group\("collectives"\)'
    with pytest.raises(ValueError, match=f"was initialised with 'gloo': call {way_out} instead"):
        DistributedDataParallel(torch.nn.Linear(1, 1))
    world = torch.distributed.group.WORLD
    with pytest.raises(TypeError, match=f"must be a collectives.ProcessGroup.*{way_out}"):
        DistributedDataParallel(torch.nn.Linear(1, 1), process_group=world)
    with pytest.raises(TypeError, match=f"must be a collectives.ProcessGroup.*{way_out}"):
        collectives.all_reduce(torch.ones(1), group=world)


def test_groups_of_other_backends_are_refused_with_the_way_out() -> None:
    run_torch(refused, 1, backend="gloo")
