"""Every pipeline schedule of torch over our groups: gradients equal those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from bridge.torch_world import run_torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

WIDTH = 4
MICRO_BATCHES = 8


def layers(count):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


def data(micro_batches=MICRO_BATCHES):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2 * micro_batches, WIDTH, generator=generator) for _ in range(2)]


def alone(model, micro_batches=MICRO_BATCHES):
    """Returns outputs and gradients of one process."""
    x, y = data(micro_batches)
    output = model(x)
    nn.functional.mse_loss(output, y).backward()
    return output.detach(), {name: one.grad for name, one in model.named_parameters()}


def same(stage, index, gradients):
    for name, one in stage.named_parameters():
        found = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
        torch.testing.assert_close(found, gradients[f"{index}.{name}"])


def run_schedule(rank, schedule, first, last):
    """Steps once; returns the outputs where this rank has the last stage."""
    x, y = data()
    losses = [] if last else None
    output = schedule.step(*([x] if first else []), target=y if last else None, losses=losses)
    if last:
        assert len(losses) == MICRO_BATCHES
        return output
    return None


def stages_of(indices, count, group=None, **options):
    whole = layers(count)
    return [
        PipelineStage(copy.deepcopy(whole[i]), i, count, torch.device("cpu"), group=group, **options)
        for i in indices
    ], alone(whole)


def one_stage_each(rank, size, schedule, given_shapes=False):
    shapes = {}
    if given_shapes:
        example = torch.empty(2, WIDTH, requires_grad=True)
        shapes = {"input_args": (example,), "output_args": (example,)}
    [stage], (expected, gradients) = stages_of([rank], size, **shapes)
    runner = schedule(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    output = run_schedule(rank, runner, rank == 0, rank == size - 1)
    if output is not None:
        torch.testing.assert_close(output, expected)
    same(stage.submod, rank, gradients)


def two_stages_each(rank, size, schedule, v_shaped):
    second = 2 * size - 1 - rank if v_shaped else rank + size
    stages, (expected, gradients) = stages_of([rank, second], 2 * size)
    runner = schedule(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    output = run_schedule(rank, runner, rank == 0, second == 2 * size - 1)
    if output is not None:
        torch.testing.assert_close(output, expected)
    for stage in stages:
        same(stage.submod, stage.stage_index, gradients)


def split_by_torch(rank, size):
    """``pipeline`` cuts the model itself."""
    model = layers(size)
    expected, gradients = alone(copy.deepcopy(model))
    cut = pipeline(
        model, mb_args=(torch.empty(2, WIDTH),),
        split_spec={str(i): SplitPoint.BEGINNING for i in range(1, size)},
    )  # fmt: skip
    stage = cut.build_stage(rank, torch.device("cpu"))
    runner = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    output = run_schedule(rank, runner, rank == 0, rank == size - 1)
    if output is not None:
        torch.testing.assert_close(output, expected)
    found = dict(stage.submod.named_parameters())
    assert len(found) == 2
    for name, one in found.items():
        torch.testing.assert_close(one.grad, gradients[name])


def inference(rank, size):
    """``eval`` runs the forward pass alone."""
    [stage], (expected, _) = stages_of([rank], size)
    runner = ScheduleGPipe(stage, MICRO_BATCHES)
    output = runner.eval(*(data()[:1] if rank == 0 else []))
    if rank == size - 1:
        torch.testing.assert_close(output, expected)


def with_data_parallelism(rank, size):
    """Two stages, each of them sharded over two ranks, which take half of the rows each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    index, part = mesh.get_coordinate()
    [stage], (_, gradients) = stages_of([index], 2, group=mesh.get_group("stages"))
    fully_shard(stage.submod, mesh=mesh["data"])
    runner = Schedule1F1B(stage, MICRO_BATCHES // 2, loss_fn=nn.functional.mse_loss)
    x, y = (one.chunk(2)[part] for one in data())
    runner.step(*([x] if index == 0 else []), target=y if index == 1 else None)
    same(stage.submod, index, gradients)
    dist.barrier()


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


@pytest.mark.parametrize("body", [split_by_torch, inference, with_data_parallelism], ids=lambda b: b.__name__)
def test_pipeline(body):
    run_torch(body, 4)
