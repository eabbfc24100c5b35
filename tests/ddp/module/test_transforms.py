"""The transforms of torch.func over the wrapper, with buffers that are sent before each forward."""

from __future__ import annotations

import copy

import pytest
import torch
from ddp_oracle import naive_average
from on_ranks import on_ranks
from torch import func, nn

from collectives.ddp import DistributedDataParallel


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.arange(3.0) + 1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(torch.tanh(self.layer(x)) * self.scale)


def squares(model):
    return lambda x: model(x).square().sum()


def of_parameters(model):
    def loss(parameters, x):
        return func.functional_call(model, parameters, (x,)).square().sum()

    return loss


TRANSFORMS = {
    "grad": lambda model, x: func.grad(squares(model))(x),
    "jacfwd": lambda model, x: func.jacfwd(model)(x),
    "jacrev": lambda model, x: func.jacrev(model)(x),
    "hessian": lambda model, x: func.hessian(squares(model))(x),
    "vjp": lambda model, x: func.vjp(model, x)[1](torch.ones(4, 3))[0],
    "jvp": lambda model, x: func.jvp(model, (x,), (x,))[1],
    "vmap": lambda model, x: func.vmap(model)(torch.stack([x, x + 1])),
    "of parameters": lambda model, x: torch.cat(
        [g.flatten() for g in func.grad(of_parameters(model))(dict(model.named_parameters()), x).values()]
    ),
    "of each sample": lambda model, x: func.vmap(func.grad(of_parameters(model)), (None, 0))(
        dict(model.named_parameters()), x[:, None]
    )[next(iter(dict(model.named_parameters())))],
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
@on_ranks(2)
def test_transforms_see_the_module_alone(group, name, before):
    """Compares a transform over the wrapper with that over the module, and trains by its result."""
    torch.manual_seed(group.rank())
    module = Scaled()
    module.norm.eval()  # which transforms do not take in training
    ours = DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
    x = torch.randn(4, 3)
    if before:  # so that buckets are laid out again within the transform, too
        ours(x).sum().backward()
        ours.zero_grad()
    with torch.no_grad():
        module.scale.add_(group.rank())  # rank 0's are sent
    twin = copy.deepcopy(module)
    twin.scale = torch.arange(3.0) + 1
    transform = TRANSFORMS[name]
    assert torch.allclose(transform(ours, x), transform(twin, x))
    loss, expected = (transform(model, x).square().sum() for model in (ours, twin))
    if not loss.requires_grad:
        loss, expected = squares(ours)(x), squares(twin)(x)
    loss.backward()
    expected.backward()
    naive_average(twin.parameters(), group)
    assert all(
        torch.allclose(mine.grad, theirs.grad, atol=1e-5)
        for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True)
        if theirs.grad is not None
    )
