"""A module whose gradients are whatever a test wants them to be."""

from __future__ import annotations

import torch
from torch import nn


class Given(nn.Module):
    """Parameters of some shapes; the gradient of each is what forward was given for it.

    Args:
        shapes: by name; they are used in reverse order, or in the order that forward gets.
        dtype: of all of them.
    """

    def __init__(self, shapes, dtype=torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        loss = torch.zeros(())
        for name, gradient in gradients.items():
            loss = loss + (getattr(self, name) * gradient).real.sum()
        return loss


def random_gradients(shapes, rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def averaged(parallel, gradients):
    """Runs one pass and returns the gradients that it leaves, by name."""
    parallel.zero_grad()
    parallel(gradients).backward()
    module = parallel.module
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def gathered(group, tensor):
    """Returns every rank's tensor."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather(found, tensor.contiguous()).wait()
    return found


def same_on_all_ranks(group, tensor):
    return all(torch.equal(tensor, other) for other in gathered(group, tensor))
