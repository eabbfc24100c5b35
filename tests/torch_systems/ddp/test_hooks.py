"""This package's communication hooks on torch's own DistributedDataParallel, over our backend."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from given_gradients import Given, random_gradients
from optimizers_in_hooks import trained
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as torchs_allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch_world import run_torch

from collectives.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
from collectives.ddp.hooks.adaptive_hook import AdaptiveState, adaptive_hook
from collectives.ddp.hooks.debugging_hooks import noop_hook
from collectives.ddp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from collectives.ddp.hooks.one_bit_hook import OneBitState, one_bit_hook
from collectives.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from collectives.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from collectives.ddp.hooks.top_k_hook import TopKState, top_k_hook

SHAPES = {"a": (12, 20), "bias": (12,), "b": (16, 3, 3), "c": (12, 20)}


def power(group=None):
    return PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)


HOOKS = {
    "allreduce": (lambda: None, allreduce_hook, 1e-6),
    "allreduce, our group": (lambda: dist.group.WORLD.inner, allreduce_hook, 1e-6),
    "fp16": (lambda: dist.group.WORLD, fp16_compress_hook, 1e-2),
    "bf16": (lambda: None, bf16_compress_hook, 1e-1),
    "wrapped": (lambda: None, fp16_compress_wrapper(allreduce_hook), 1e-2),
    "wrapped twice": (power, bf16_compress_wrapper(powerSGD_hook), 9),
    "powerSGD": (power, powerSGD_hook, 9),
    "batched powerSGD": (lambda: power(dist.group.WORLD), batched_powerSGD_hook, 9),
    "pertensor": (lambda: None, quantization_pertensor_hook, 0.05),
    "perchannel": (lambda: None, quantization_perchannel_hook, 0.05),
    "one bit": (OneBitState, one_bit_hook, 9),
    "top k": (lambda: TopKState(ratio=0.1), top_k_hook, 9),
    "adaptive": (AdaptiveState, adaptive_hook, 9),
    "post local": (lambda: PostLocalSGDState(None, dist.group.WORLD, 2), post_localSGD_hook, 1e-6),
    "noop": (lambda: None, noop_hook, 9),
}


def pass_over(model, rank, step):
    model.zero_grad()
    model(random_gradients(SHAPES, rank, step)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def every_hook(rank, size):
    found = {}
    for name, (make, hook, tolerance) in HOOKS.items():
        model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.001)
        model.register_comm_hook(make(), hook)
        total, truth = (dict.fromkeys(SHAPES, torch.zeros(())) for _ in range(2))
        for step in range(5):
            result = pass_over(model, rank, step)
            for key, tensor in result.items():
                both = [torch.empty_like(tensor) for _ in range(size)]
                dist.all_gather(both, tensor)
                assert name == "noop" or torch.equal(*both), (name, key, step)
                mean = sum(random_gradients(SHAPES, r, step)[key] for r in range(size)) / size
                distance = float((tensor - mean).abs().max())
                assert distance < tolerance, (name, key, step, distance)
                total[key], truth[key] = total[key] + tensor, truth[key] + mean
                assert name != "noop" or torch.equal(tensor, random_gradients(SHAPES, rank, step)[key])
        rest = torch.cat([(total[key] - truth[key]).flatten() for key in SHAPES])
        whole = torch.cat([truth[key].flatten() for key in SHAPES])
        found[name] = distance, float(rest.norm() / whole.norm())
    return found


def test_every_hook():
    for found in run_torch(every_hook, 2):
        for name, (_, _, tolerance) in HOOKS.items():
            # Those that leave something out do so here, too.
            distance, part = found[name]
            assert (distance > 0.06) == (tolerance == 9), (name, distance)
            # What was left out of one step comes with later ones; of nothing at all, the part would be 1.
            assert name == "noop" or part < 0.9, (name, part)


def keeps_errors(rank, size):
    """Buckets are rebuilt after the first pass; a state that compresses already keeps its errors."""
    state = power()
    model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0005)
    model.register_comm_hook(state, powerSGD_hook)
    for step in range(3):
        pass_over(model, rank, step)
    state = copy.deepcopy(state)
    model = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.0005)
    model.register_comm_hook(state, powerSGD_hook)
    numbers = None
    for step in range(3, 7):
        before = {key: error.clone() for key, error in state.error_dict.items()}
        assert len(before) == len(SHAPES)
        result = pass_over(model, rank, step)
        given = random_gradients(SHAPES, rank, step)
        numbers = {name: f"parameter {state.keys._number(p)}" for name, p in model.module.named_parameters()}
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
    assert "iter: 0 on rank 0, 1 on rank 1" in str(caught.value)


def optimizer_in_the_hook(rank, size):
    wrap = partial(DistributedDataParallel, bucket_cap_mb=1e-6)
    assert all(map(torch.equal, *trained(wrap, rank, torchs_allreduce_hook, None)))


def over_torchs_group(rank, size):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, allreduce_hook)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 2] * 2


@pytest.mark.parametrize("body", [by_name, refused, optimizer_in_the_hook], ids=lambda body: body.__name__)
def test_names_and_errors(body):
    run_torch(body, 2)


def test_hooks_of_ours_over_torchs_gloo():
    run_torch(over_torchs_group, 2, backend="gloo")
