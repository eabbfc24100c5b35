"""Training with data that worker processes load, forked off the ranks or started anew."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as torch_dist
from harness import run_world
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch_world import run_torch

import collectives as dist
from collectives import GroupAbortedError
from collectives.ddp import DistributedDataParallel


class Intrusive(Dataset):
    """Rows of a tensor, whose worker tries to take part in the training; and whether it was refused."""

    def __init__(self, rows, all_reduce):
        self._rows, self._all_reduce = rows, all_reduce

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        try:
            self._all_reduce(torch.ones(1))
        except GroupAbortedError as error:
            return self._rows[index], "belongs to the parent of this forked process" in str(error)
        return self._rows[index], False


def train(wrapper, loader):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    parallel = wrapper(copy.deepcopy(model))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    seen = 0
    for rows, refused in loader:
        assert bool(refused.all())
        optimizer.zero_grad()
        parallel(rows).square().mean().backward()
        optimizer.step()
        seen += len(rows)
    assert seen == 24
    return [p.detach().clone() for p in parallel.parameters()]


def with_workers(rank, size, wrapper, all_reduce, spawns):
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(24, 3, generator=generator)
    plain = TensorDataset(rows, torch.ones(24, dtype=torch.bool))
    load = functools.partial(DataLoader, batch_size=4, timeout=40)
    expected = train(wrapper, load(plain, timeout=0))
    forked = load(Intrusive(rows, all_reduce), num_workers=2, multiprocessing_context="fork")
    for loader in (forked, forked):
        assert all(map(torch.equal, train(wrapper, loader), expected))
    if spawns:  # by one rank, because it takes long
        started = load(plain, num_workers=2, multiprocessing_context="spawn") if rank == 0 else forked
        assert all(map(torch.equal, train(wrapper, started), expected))
    tensor = torch.ones(1)
    all_reduce(tensor)
    assert tensor.item() == size
    return True


def ours(rank, size):
    return with_workers(rank, size, DistributedDataParallel, dist.all_reduce, spawns=False)


def of_torch(rank, size):
    wrapper = torch.nn.parallel.DistributedDataParallel
    return with_workers(rank, size, wrapper, torch_dist.all_reduce, spawns=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_backend", ["host", "gloo"])
def test_workers_of_our_training(world_backend):
    assert run_world(ours, 2, backend=world_backend) == [True, True]


@pytest.mark.full
def test_workers_of_torchs_training():
    assert run_torch(of_torch) == [True, True]
