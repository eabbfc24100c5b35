"""Joinables of torch under our Join, and ours under torch's, over torch's group of our backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchAverager
from torch_world import run_torch

from collectives.ddp import DistributedDataParallel, Join, UnevenInputsError
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from collectives.ddp.model_averaging import PeriodicModelAverager
from collectives.ddp.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

TorchDDP = nn.parallel.DistributedDataParallel


def torch_zero(*args, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero  # its import warns

    return TorchZero(*args, **options)


def net():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def ours(module):
    return DistributedDataParallel(module, process_group=dist.group.WORLD)


def batch(rank, step):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def bits(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def loop(model, optimizer, rank, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def make_zero(kind, model):
    return kind(model.parameters(), optimizer_class=torch.optim.Adam, process_group=dist.group.WORLD, lr=0.01)


def joined(rank, size, join, wrap, zero):
    model = wrap(net())
    optimizer = make_zero(zero, model)
    with join([model, optimizer]):
        loop(model, optimizer, rank, 2 + 2 * rank)
    return bits(model)


COMBINATIONS = [
    (Join, TorchDDP, torch_zero),
    (Join, ours, torch_zero),
    (Join, TorchDDP, ZeroRedundancyOptimizer),
    (TorchJoin, ours, ZeroRedundancyOptimizer),
    (TorchJoin, TorchDDP, ZeroRedundancyOptimizer),
    (Join, ours, ZeroRedundancyOptimizer),
]


def all_combinations(rank, size):
    return [joined(rank, size, *combination) for combination in COMBINATIONS]


def test_joinables_of_both_kinds_under_both_contexts() -> None:
    """All ranks have one model in the end, and one of ours has the gradients that the others average."""
    results = run_torch(all_combinations, 3)
    for place in range(len(COMBINATIONS)):
        assert all(torch.equal(result[place], results[0][place]) for result in results)
    for first, second in ((1, 5), (3, 5)):
        assert torch.equal(results[0][first], results[0][second])


def early(rank, size):
    """Both kinds of calls tell all ranks that one ran out of inputs."""
    seen = []
    for join, wrap, kind in ((Join, TorchDDP, RuntimeError), (Join, ours, UnevenInputsError),
                             (TorchJoin, ours, RuntimeError)):  # fmt: skip
        model = wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(kind), join([model], throw_on_early_termination=True):
            loop(model, optimizer, rank, 1 + rank)
        seen.append(kind)
    return len(seen)


def test_early_termination_under_both_contexts() -> None:
    assert run_torch(early, 2) == [3, 3]


def overlapped(rank, size):
    """Our optimizer updates within the backward pass of torch's module."""
    wrong = []
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for shard in (False, True):
            plain_model, model = TorchDDP(net()), TorchDDP(net(), bucket_cap_mb=0.00005)
            plain = torch.optim.Adam(plain_model.parameters(), lr=0.01)
            zero = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, dist.group.WORLD, overlap_with_ddp=True, lr=0.01
            )
            model.register_comm_hook(None, make(allreduce_hook, model, zero, shard))
            loop(plain_model, plain, rank, 4)
            loop(model, zero, rank, 4)
            if not torch.allclose(bits(plain_model), bits(model), atol=1e-7):
                wrong.append((make.__name__, shard))
    return wrong


def test_updates_during_the_backward_pass_of_torchs_module() -> None:
    assert run_torch(overlapped, 2) == [[], []]


def averaging(rank, size):
    """Our optimizer with torch's averager, and ours over torch's group."""
    results = []
    for averager in (TorchAverager(2), PeriodicModelAverager(2, process_group=dist.group.WORLD)):
        module = net()
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), averager)
        loop(module, optimizer, rank, 5)
        results.append(bits(module))
    return results


def test_model_averagers_of_both_kinds() -> None:
    first, second = run_torch(averaging, 2)
    for mine, others in zip(first, second, strict=True):
        assert torch.equal(mine, others)
    assert torch.allclose(*first)
