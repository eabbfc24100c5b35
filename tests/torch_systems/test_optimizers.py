"""Optimizers of torch that communicate, over our groups; its Join is in ``ddp``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.nn.parallel import DistributedDataParallel
from torch_systems.small import check, net, share, train, trained
from torch_world import run_torch

pytestmark = pytest.mark.full


def torch_zero(*args, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    return ZeroRedundancyOptimizer(*args, **options)


def post_local_sgd(*args, **options):
    from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(*args, **options)


def zero(rank, size):
    expected = trained(net(), size)
    model = DistributedDataParallel(net())
    optimizer = torch_zero(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.05)
    train(model, optimizer, size, share(rank))
    check(model.module.state_dict(), expected)
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        assert len(optimizer.state_dict()["state"]) == len(expected)


def local_sgd(rank, size):
    """Two steps with averaged gradients, then steps of each pair alone, and averages every other step."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(net())
    state = PostLocalSGDState(process_group=None, subgroup=pairs[rank // 2], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = post_local_sgd(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    train(model, optimizer, size, share(rank), steps=range(6))
    check(model.module.state_dict(), by_hand(size, 6, warm_up=2, period=2)[rank // 2])


def by_hand(size, steps, warm_up, period):
    """Returns what pairs that train alone and average come to, from one process that plays them all."""
    pairs = [net() for _ in range(size // 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pairs]
    for step in range(steps):
        for pair, (model, optimizer) in enumerate(zip(pairs, optimizers, strict=True)):
            rows = slice(None) if step < warm_up else slice(8 * pair, 8 * pair + 8)
            train(model, optimizer, size, rows, steps=[step])
        if step >= warm_up and (step - warm_up) % period == 0:
            mean = {
                name: torch.stack([model.state_dict()[name] for model in pairs]).mean(0)
                for name in pairs[0].state_dict()
            }
            for model in pairs:
                model.load_state_dict(mean)
    return [model.state_dict() for model in pairs]


def averages_in_levels(rank, size):
    """Every second step averages over pairs, every fourth over all."""
    averager = HierarchicalModelAverager(period_group_size_dict={2: 2, 4: 4}, warmup_steps=0)
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.zeros(1, 1)  # parameters without one are left out
    seen = []
    for _ in range(4):
        torch.nn.init.constant_(model.weight, float(rank))
        averager.average_parameters(model.parameters())
        seen.append(model.weight.item())
    pair = rank // 2 * 2 + 0.5
    assert seen == [1.5, rank, pair, rank]


@pytest.mark.parametrize(
    "body",
    [zero, local_sgd, averages_in_levels],
    ids=lambda body: body.__name__,
)
def test_optimizer(body):
    run_torch(body, 4)
