"""Groups of ``torch.distributed`` in the place of this package's, for DDP and for the functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from on_ranks import on_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_world import run_torch

import collectives
from collectives.ddp import DistributedDataParallel, GradBucket, GradientSyncError, SyncBatchNorm
from collectives.ddp.hooks.default_hooks import allreduce_hook
from collectives.ddp.model_averaging import average_parameters
from collectives.ddp.optim import ZeroRedundancyOptimizer


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


def over_gloo(rank: int, size: int) -> None:
    """Between operations of the program's own, on the world, a part of it and a mesh; a hook fails once."""
    world, part = torch.distributed.group.WORLD, torch.distributed.new_group([0, 1])
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    reference = torch.nn.parallel.DistributedDataParallel(network())
    inputs = torch.arange(24.0).view(6, 4)[rank * 3 : rank * 3 + 3]
    reference(inputs).sum().backward()
    normed = SyncBatchNorm(1)(torch.full((2, 1), float(rank)))
    assert normed[0].item() == pytest.approx(2.0 * rank - 1.0, abs=0.1)
    groups = []
    for chosen in ({}, {"process_group": world}, {"process_group": part}, {"device_mesh": mesh["inner"]}):
        model = DistributedDataParallel(network(), **chosen)  # type: ignore[arg-type]
        works = [torch.distributed.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
        model(inputs).sum().backward()
        torch.distributed.all_reduce(count := torch.ones(2))
        assert count.tolist() == [2, 2]
        for work in works:
            work.wait()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert model.process_group.global_ranks == (0, 1)
        groups.append(model.process_group)
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=part, lr=0.1).step()
    average_parameters(model.parameters(), part)
    assert groups[0] is groups[1] is groups[3]
    assert groups[0] is not groups[2]
    model = DistributedDataParallel(network(), process_group=part)
    model.register_comm_hook(OnceFailing(rank == 1, model.process_group), once_failing)
    with pytest.raises(GradientSyncError, match=r"rank 1.*no numbers"):
        model(inputs).sum().backward()
    model.zero_grad()
    model(inputs).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    torch.distributed.barrier()


class OnceFailing:
    def __init__(self, fails: bool, group: collectives.ProcessGroup) -> None:
        self.fails, self.group = fails, group


def once_failing(state: OnceFailing, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    fails, state.fails = state.fails, False
    if fails:
        raise KeyError("no numbers")
    return allreduce_hook(state.group, bucket)


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_gloo_groups_of_torch_carry_ours(debug: str) -> None:
    run_torch(over_gloo, backend="gloo", env={"TORCH_DISTRIBUTED_DEBUG": debug})


@on_ranks(1, None, isolated=True)
def test_groups_of_other_backends_are_refused_with_the_way_out(rank: int, size: int) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    way_out = r'torch.distributed.init_process_group\("collectives"\)'
    with pytest.raises(ValueError, match=f"was initialised with 'fake': call {way_out} instead"):
        DistributedDataParallel(torch.nn.Linear(1, 1))
    world = torch.distributed.group.WORLD
    with pytest.raises(TypeError, match=f"must be a collectives.ProcessGroup.*{way_out}"):
        DistributedDataParallel(torch.nn.Linear(1, 1), process_group=world)
    with pytest.raises(TypeError, match=f"must be a collectives.ProcessGroup.*{way_out}"):
        collectives.all_reduce(torch.ones(1), group=world)
