"""Every pipeline schedule of torch over our groups: gradients equal those of one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch_systems.pipeline.stages import MICRO_BATCHES, WIDTH, data, run_schedule, same, stages_of
from torch_world import run_torch


def one_stage_each(rank, size, schedule, given_shapes=False):
    shapes = {}
    if given_shapes:
        example = torch.empty(2, WIDTH, requires_grad=True)
        shapes = {"input_args": (example,), "output_args": (example,)}
    [stage], (expected, gradients) = stages_of([rank], size, **shapes)
    runner = schedule(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    output = run_schedule(runner, rank == 0, rank == size - 1)
    if output is not None:
        torch.testing.assert_close(output, expected)
    same(stage.submod, rank, gradients)


def two_stages_each(rank, size, schedule, v_shaped, own_weights=False):
    """With ``own_weights``, what the schedule puts off of a backward pass are functions of the program."""
    second = 2 * size - 1 - rank if v_shaped else rank + size
    late = []
    options = {"dw_builder": lambda: functools.partial(late.append, rank)} if own_weights else {}
    stages, (expected, gradients) = stages_of([rank, second], 2 * size, **options)
    runner = schedule(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    output = run_schedule(runner, rank == 0, second == 2 * size - 1)
    if output is not None:
        torch.testing.assert_close(output, expected)
    for stage in stages:
        same(stage.submod, stage.stage_index, gradients)
    assert len(late) == (len(stages) * MICRO_BATCHES if own_weights else 0)


def inference(rank, size):
    """``eval`` runs the forward pass alone."""
    [stage], (expected, _) = stages_of([rank], size)
    runner = ScheduleGPipe(stage, MICRO_BATCHES)
    output = runner.eval(*(data()[:1] if rank == 0 else []))
    if rank == size - 1:
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_one_stage_each(schedule):
    run_torch(one_stage_each, 4, schedule)


def test_given_shapes():
    run_torch(one_stage_each, 4, Schedule1F1B, True)


@pytest.mark.parametrize(
    ("schedule", "v_shaped"),
    [
        (ScheduleLoopedBFS, False),
        (ScheduleInterleaved1F1B, False),
        (ScheduleInterleavedZeroBubble, False),
        (ScheduleZBVZeroBubble, True),
        (ScheduleDualPipeV, True),
    ],
)
def test_two_stages_each(schedule, v_shaped):
    run_torch(two_stages_each, 4, schedule, v_shaped)


def test_weights_of_the_program():
    run_torch(two_stages_each, 4, ScheduleInterleavedZeroBubble, False, True)


def test_inference():
    run_torch(inference, 4)
