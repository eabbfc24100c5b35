"""This package's communication hooks on torch's own DistributedDataParallel, over our backend."""

from __future__ import annotations

import copy
from functools import partial

import hook_zoo
import pytest
import torch
import torch.distributed as dist
from given_gradients import Given, averaged, random_gradients
from optimizers_in_hooks import trained
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as torchs_allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch_world import run_torch

from collectives.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
from collectives.ddp.hooks.default_hooks import allreduce_hook
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

SHAPES = {"a": (12, 20), "bias": (12,), "b": (16, 3, 3), "c": (12, 20)}


def power():
    return PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


def every_hook(rank, size):
    """On uneven inputs; torch's module takes no sparse gradients with a hook."""
    return hook_zoo.train_with_every_hook(dist.group.WORLD, DistributedDataParallel)


def test_every_hook():
    hook_zoo.check(run_torch(every_hook, 2))


def keeps_errors(rank, size):
    """Buckets are rebuilt after the first pass; a state that compresses already keeps its errors."""
    state = power()
    model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0005)
    model.register_comm_hook(state, powerSGD_hook)
    for step in range(3):
        averaged(model, random_gradients(SHAPES, rank, step))
    state = copy.deepcopy(state)
    model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0005)
    model.register_comm_hook(state, powerSGD_hook)
    numbers = None
    for step in range(3, 7):
        before = {key: error.clone() for key, error in state.error_dict.items()}
        assert len(before) == len(SHAPES)
        given = random_gradients(SHAPES, rank, step)
        result = averaged(model, given)
        numbers = {name: f"parameter {state._numbers[p]}" for name, p in model.module.named_parameters()}
        assert sorted(numbers.values()) == sorted(before)
        for name in ("a", "b", "c"):
            key = numbers[name]
            kept = (result[name] - given[name]).flatten() + state.error_dict[key]
            torch.testing.assert_close(kept, before[key], rtol=1e-5, atol=1e-5)


def test_errors_survive_new_buckets():
    run_torch(keeps_errors, 2)


def by_name(rank, size):
    for kind in DDPCommHookType:
        register_ddp_comm_hook(kind, DistributedDataParallel(torch.nn.Linear(2, 2)))


def refused(rank, size):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    state = power()
    state.iter = rank
    model.register_comm_hook(state, powerSGD_hook)
    with pytest.raises(Exception, match="the ranks' states differ") as caught:
        model(torch.ones(1, 4)).sum().backward()
    assert "iter: 0 on rank 0; 1 on rank 1" in str(caught.value)


def optimizer_in_the_hook(rank, size):
    wrap = partial(DistributedDataParallel, bucket_cap_mb=1e-6)
    assert all(map(torch.equal, *trained(wrap, rank, torchs_allreduce_hook, None)))


def averages(rank, size, of_ours=False):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(dist.group.WORLD.inner if of_ours else None, allreduce_hook)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 2] * 2


@pytest.mark.parametrize("body", [by_name, refused, optimizer_in_the_hook])
def test_names_and_errors(body):
    run_torch(body, 2)


def test_hooks_of_ours_over_torchs_gloo():
    run_torch(averages, 2, backend="gloo")


def test_state_is_our_group():
    run_torch(averages, 2, True)
