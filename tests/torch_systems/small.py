"""A small model, its data, and one process on all of the data, which every system must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn

STEPS = 3
ROWS = 4
"""Rows of every step's batch for each rank."""


class Block(nn.Module):
    """Two layers around an activation."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks, of sizes that 4 ranks cannot share equally where ``even`` is not set."""

    def __init__(self, even: bool = False) -> None:
        super().__init__()
        self.first = Block(4, 16 if even else 10, 8)
        self.second = Block(8, 8 if even else 5, 4 if even else 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def net(even: bool = False) -> Net:
    """Returns the model, with the same parameters on every rank."""
    torch.manual_seed(7)
    return Net(even)


def batch(step: int, size: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs and targets of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    rows = size * ROWS
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, outputs, generator=generator)


def share(rank: int) -> slice:
    """Returns a rank's rows."""
    return slice(ROWS * rank, ROWS * (rank + 1))


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns an optimizer that keeps a state, and whose steps are not linear in the gradients."""
    return torch.optim.AdamW(parameters, lr=0.05)


def train(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    size: int,
    rows: slice = slice(None),
    outputs: int = 3,
    before_step: Callable[[], object] = lambda: None,
    steps: Iterable[int] = range(STEPS),
) -> None:
    """Trains on the given rows of every batch."""
    for step in steps:
        x, y = batch(step, size, outputs)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        before_step()
        optimizer.step()


def trained(model: nn.Module, size: int, **options: object) -> dict[str, torch.Tensor]:
    """Returns the parameters of a copy of the model that this process trained alone."""
    oracle = copy.deepcopy(model)
    train(oracle, adam(oracle.parameters()), size, **options)
    return {name: value.detach() for name, value in oracle.state_dict().items()}


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    """Compares parameters by name; DTensors by their full values."""
    assert list(found) == list(expected)
    for name, value in found.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(
            whole.detach().float(),
            expected[name],
            msg=lambda text, name=name: f"{name}: {text}",
            **(tolerance or {"rtol": 1e-4, "atol": 1e-5}),
        )
