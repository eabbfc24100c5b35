"""Training with torch's hook that steps an optimizer after each bucket, beside steps after backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)

from collectives.ddp import DistributedDataParallel
from collectives.ddp.hooks.default_hooks import allreduce_hook, bf16_compress_hook


class StepByParameter:
    """SGD with momentum in the form that the hooks call: one parameter and its gradient at a time."""

    def __init__(self):
        self.velocity = {}

    @torch.no_grad()
    def step_param(self, parameter, gradient):
        velocity = self.velocity.setdefault(parameter, torch.zeros_like(parameter))
        parameter.sub_(velocity.mul_(0.9).add_(gradient), alpha=0.1)


def trained(wrap, rank, hook, state, chosen="", device="cpu"):
    """Returns the parameters of two models: one stepped in the hook, one after backward.

    Args:
        wrap: makes the wrapper of a module.
        rank: this rank.
        hook: the hook whose result is stepped with.
        state: its state.
        chosen: part of the names of those parameters that are stepped.
        device: where to train.
    """
    results = []
    for inside in (True, False):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        model = wrap(net.to(device))
        parameters = [p for name, p in net.named_parameters() if chosen in name]
        optimizer = StepByParameter()
        wrapped = _hook_then_optimizer(hook, _OptimizerHookState(optimizer, parameters))
        model.register_comm_hook(state, wrapped if inside else hook)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model.zero_grad()
            model(torch.randn(5, 4, generator=generator).to(device)).square().sum().backward()
            for parameter in () if inside else parameters:
                optimizer.step_param(parameter, parameter.grad)
        results.append([parameter.detach() for parameter in net.parameters()])
    return results


def every_form(group, device="cpu"):
    """Returns the hooks and options of our wrapper with which both ways differ."""
    wrong = []
    for hook in (allreduce_hook, bf16_compress_hook):
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            for chosen in ("", "weight"):
                wrap = partial(DistributedDataParallel, process_group=group, bucket_cap_mb=1e-6, **options)
                inside, after = trained(wrap, group.rank(), hook, group, chosen, device)
                if not all(map(torch.equal, inside, after)):
                    wrong.append((hook.__name__, options, chosen))
    return wrong
