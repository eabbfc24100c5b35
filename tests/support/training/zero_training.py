"""A model, its data and its training, for the tests of ZeroRedundancyOptimizer."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Parameters of very different sizes, one laid out in another order, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(12, 40)
        self.frozen = nn.Linear(40, 8)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.frozen(torch.tanh(self.wide(self.conv(x).flatten(1)))))


def net(seed=3):
    torch.manual_seed(seed)
    return Net()


def batch(rank, step):
    return torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def groups_of(module):
    """Two parameter groups with different options; the second one has the frozen parameters, too."""
    return [
        {"params": [*module.conv.parameters(), *module.wide.parameters()]},
        {"params": [*module.frozen.parameters(), *module.last.parameters()], "lr": 0.02},
    ]


def bits(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def train(model, optimizer, group, steps=4, first=0, schedule=False):
    """Returns the parameters after each step."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedule else None
    states = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(group.rank(), step)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        states.append(bits(model))
    return states


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def equal_states(ours, theirs):
    return ours["param_groups"] == theirs["param_groups"] and equal_values(ours["state"], theirs["state"])


def equal_values(ours, theirs):
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal_values(ours[key], theirs[key]) for key in theirs)
    return torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
