"""A model of equal layers for pipelines, its data, and one process on all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule

WIDTH = 4
MICRO_BATCHES = 8


def layer() -> nn.Module:
    """Returns what one stage has."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def layers(count: int) -> nn.Sequential:
    """Returns the model, with the same parameters on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(*(layer() for _ in range(count)))


def data() -> list[torch.Tensor]:
    """Returns inputs and targets of a step, of two rows for each micro batch."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2 * MICRO_BATCHES, WIDTH, generator=generator) for _ in range(2)]


def alone(model: nn.Module, **inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns outputs and gradients of one process."""
    x, y = data()
    output = model(x, **inputs)
    nn.functional.mse_loss(output, y).backward()
    return output.detach(), {name: one.grad for name, one in model.named_parameters()}


def same(stage: nn.Module, index: int, gradients: dict[str, torch.Tensor]) -> None:
    """Compares the gradients of a stage, which may be wrapped and sharded, with those of the whole model."""
    found = dict(stage.named_parameters())
    assert len(found) == 2
    for name, one in found.items():
        grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
        torch.testing.assert_close(grad, gradients[f"{index}.{name.removeprefix('module.')}"])


def run_schedule(
    schedule: _PipelineSchedule, first: bool, last: bool, **inputs: torch.Tensor
) -> torch.Tensor | None:
    """Steps once; returns the outputs where this rank has the last stage."""
    x, y = data()
    losses = [] if last else None
    given = {"target": y if last else None, "losses": losses, **(inputs if first else {})}
    output = schedule.step(*([x] if first else []), **given)
    if last:
        assert len(losses) == MICRO_BATCHES
        return output
    return None


def stages_of(
    indices: Iterable[int],
    count: int,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    **options: Any,
) -> tuple[list[PipelineStage], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Returns stages of the given numbers, and what one process with all of them has after a step."""
    whole = layers(count)
    return [
        PipelineStage(wrap(copy.deepcopy(whole[i])), i, count, torch.device("cpu"), **options)
        for i in indices
    ], alone(whole)
