"""torch's own DistributedDataParallel on our groups: after training, equal to one process on all the data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_world import run_torch

STEPS = 4


class Net(torch.nn.Module):
    """Two layers that are always used, and one that only even steps use."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 3)
        self.sometimes = torch.nn.Linear(3, 3)

    def forward(self, x, use_all=True):
        x = self.second(torch.tanh(self.first(x)))
        return self.sometimes(x) if use_all else x


def batches(step, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size * 4, 6, generator=generator), torch.randn(size * 4, 3, generator=generator)


def train(model, size, part, uses_all=lambda step: True, run=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = (data[part] for data in batches(step, size))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x, uses_all(step)), y)
        (run or torch.Tensor.backward)(loss)
        optimizer.step()


def compare(model, oracle):
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    for other in copies:
        assert torch.equal(flat, other)


def equals_one_process(rank, size, uses_all=lambda step: True, **options):
    torch.manual_seed(1)
    oracle = Net()
    wrapped = copy.deepcopy(oracle)
    if rank:  # the constructor must bring every rank to rank 0's parameters
        torch.nn.init.zeros_(wrapped.first.weight)
    model = DistributedDataParallel(wrapped, bucket_cap_mb=0.0001, **options)
    train(oracle, size, slice(None), uses_all)
    train(model, size, slice(4 * rank, 4 * rank + 4), uses_all)
    compare(model.module, oracle)


def unused_parameters(rank, size):
    equals_one_process(rank, size, lambda step: step % 2 == 0, find_unused_parameters=True)


def static_graph(rank, size):
    equals_one_process(rank, size, static_graph=True)


def no_sync(rank, size):
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    with model.no_sync():
        model(torch.full((1, 2), rank + 1.0)).backward()
        assert torch.equal(model.module.weight.grad, torch.full((1, 2), rank + 1.0))
    model(torch.full((1, 2), rank + 1.0)).backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 2), size + 1.0))


def uneven_inputs(rank, size):
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    steps = 0
    with model.join():
        for _ in range(rank + 1):
            model(torch.ones(1, 2)).sum().backward()
            steps += 1
    assert steps == rank + 1


@pytest.mark.parametrize("body", [unused_parameters, static_graph, no_sync, uneven_inputs])
def test_ddp(body):
    run_torch(body, 3)
