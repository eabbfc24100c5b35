"""Pipelines of torch over our groups whose models torch cuts, or whose stages are themselves parallel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipe_split, pipeline
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_systems.pipeline.stages import (
    MICRO_BATCHES,
    WIDTH,
    alone,
    data,
    layer,
    layers,
    run_schedule,
    same,
    stages_of,
)
from torch_world import run_torch

CPU = torch.device("cpu")


class Skipping(nn.Module):
    """Cuts itself into three stages; the last one takes outputs of both others, if told to."""

    def __init__(self, skip):
        super().__init__()
        self.skip = skip
        self.first, self.second, self.third = layer(), layer(), layer()

    def forward(self, x, factor=None):
        x = self.first(x * factor)
        pipe_split()
        y = self.second(x)
        pipe_split()
        return self.third(x - y if self.skip else y)


def skipping(skip):
    torch.manual_seed(4)
    return Skipping(skip)


def cut_behind_every_activation(graph_module):
    """A policy of where to cut."""
    graph = graph_module.graph
    *others, _ = [node for node in graph.nodes if node.target is torch.ops.aten.tanh.default]
    for node in others:
        with graph.inserting_after(node):
            graph.call_function(torch.ops.pippy._pipe_split.default)
    graph_module.recompile()
    return graph_module


def cut_by_torch(rank, size):
    """By names of layers that stages begin or end with, by a policy, and by the model itself."""
    micro_batch = torch.empty(2, WIDTH)
    ways = [
        (layers(3), {"split_spec": {str(i): SplitPoint.BEGINNING for i in (1, 2)}}),
        (layers(3), {"split_spec": {str(i): SplitPoint.END for i in (0, 1)}}),
        (layers(3), {"split_policy": cut_behind_every_activation}),
        (skipping(skip=False), {"mb_kwargs": {"factor": torch.empty(2, 1)}}),
    ]
    factors = torch.linspace(0.5, 2, 2 * MICRO_BATCHES)[:, None]
    for model, options in ways:
        inputs = {"factor": factors} if "mb_kwargs" in options else {}
        expected, gradients = alone(copy.deepcopy(model), **inputs)
        cut = pipeline(model, mb_args=(micro_batch,), **options)
        assert cut.num_stages == size
        stage = cut.build_stage(rank, CPU)
        runner = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        output = run_schedule(runner, rank == 0, rank == size - 1, **inputs)
        if output is not None:
            torch.testing.assert_close(output, expected)
        found = dict(stage.submod.named_parameters())
        assert len(found) == 2
        for name, one in found.items():
            torch.testing.assert_close(one.grad, gradients[name])
    model = skipping(skip=True)  # only forward: torch has no backward pass over such a connection
    expected, _ = alone(copy.deepcopy(model), factor=factors)
    stage = pipeline(model, (micro_batch,), {"factor": torch.empty(2, 1)}).build_stage(rank, CPU)
    given = {"factor": factors} if rank == 0 else {}
    output = ScheduleGPipe(stage, MICRO_BATCHES).eval(*data()[: rank == 0], **given)
    if rank == size - 1:
        torch.testing.assert_close(output, expected)
    with pytest.raises(ValueError, match="Cannot specify both"):
        pipeline(layers(2), (micro_batch,), split_spec={}, split_policy=cut_behind_every_activation)


def other_shape(rank, size):
    """A stage that makes another shape than was said names both; the next one does not wait for it."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch compares them only then
    try:
        example = torch.empty(2, WIDTH, requires_grad=True)
        said = torch.empty(2, WIDTH + 1, requires_grad=True)
        [stage], _ = stages_of(
            [rank], size, input_args=(example,), output_args=(said if rank == 0 else example,)
        )
        runner = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        expected = "shape mismatch: .*2, 5.* vs .*2, 4" if rank == 0 else "rank 0"
        with pytest.raises(RuntimeError, match=expected):
            run_schedule(runner, rank == 0, rank == size - 1)
        dist.destroy_process_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def with_copies_and_shards(rank, size):
    """Two stages, each of them on two ranks that take half of the rows: by DDP, and in shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    index, part = mesh.get_coordinate()
    for wrap in (
        lambda module: DistributedDataParallel(module, process_group=mesh.get_group("data")),
        lambda module: fully_shard(module, mesh=mesh["data"]),
    ):
        [stage], (_, gradients) = stages_of([index], 2, wrap, group=mesh.get_group("stages"))
        runner = Schedule1F1B(stage, MICRO_BATCHES // 2, loss_fn=nn.functional.mse_loss)
        x, y = (one.chunk(2)[part] for one in data())
        runner.step(*([x] if index == 0 else []), target=y if index == 1 else None)
        same(stage.submod, index, gradients)


def with_split_layers(rank, size):
    """Two stages on each of two ranks, each of them split over two ranks, with shards from stage to stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "tensor"))
    index = mesh.get_local_rank("stages")

    def split(module, number):
        first, last = number == 0, number == 3
        return parallelize_module(module, mesh["tensor"], {
            "0": ColwiseParallel(
                input_layouts=Replicate() if first else Shard(-1),
                output_layouts=Replicate() if last else Shard(-1), use_local_output=last,
            ),
        })  # fmt: skip

    whole = layers(4)
    stages = [
        PipelineStage(
            split(copy.deepcopy(whole[i]), i), i, 4, CPU, group=mesh.get_group("stages"),
            get_mesh=lambda names, layout: mesh["tensor"],
        )
        for i in (index, index + 2)
    ]  # fmt: skip
    expected, gradients = alone(whole)
    runner = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    output = run_schedule(runner, index == 0, index == 1)
    if output is not None:
        torch.testing.assert_close(output, expected)
    for stage in stages:
        assert isinstance(next(stage.submod.parameters()), DTensor)
        same(stage.submod, stage.stage_index, gradients)


def seeds(rank, size):
    """Ranks of a stage draw the same numbers, those of another stage others.

    By torch's own generator, because DTensors have none of theirs on the CPU; that is what torch warns of.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "tensor"))
    index, tensor = mesh.get_local_rank("stages"), mesh["tensor"]
    torch.manual_seed(20 + index)
    weight = torch.empty(WIDTH, WIDTH)
    drawn = distribute_tensor(weight, tensor, [Replicate()])
    with pytest.warns(UserWarning, match="may not have complete support on cpu"):
        nn.init.uniform_(drawn)
    every = [torch.empty_like(weight) for _ in range(size)]
    dist.all_gather(every, drawn.to_local())
    expected = [
        torch.empty_like(weight).uniform_(generator=torch.Generator().manual_seed(20 + i)) for i in (0, 1)
    ]
    assert all(torch.equal(one, expected[i // 2]) for i, one in enumerate(every))
    assert not torch.equal(*expected)


def three_dimensions(rank, size):
    """Two stages, in two shards, of layers split in two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stages", "data", "tensor"))
    index, part, _ = mesh.get_coordinate()

    def wrap(module):
        plan = {"0": ColwiseParallel(output_layouts=Replicate())}
        return fully_shard(parallelize_module(module, mesh["tensor"], plan), mesh=mesh["data"])

    [stage], (_, gradients) = stages_of([index], 2, wrap, group=mesh.get_group("stages"))
    assert stage.submod[0].weight.to_local().shape == (1, WIDTH)
    runner = Schedule1F1B(stage, MICRO_BATCHES // 2, loss_fn=nn.functional.mse_loss)
    x, y = (one.chunk(2)[part] for one in data())
    runner.step(*([x] if index == 0 else []), target=y if index == 1 else None)
    same(stage.submod, index, gradients)


@pytest.mark.parametrize(
    "body",
    [with_copies_and_shards, with_split_layers, seeds],
    ids=lambda body: body.__name__,
)
def test_parallel_stages(body):
    run_torch(body, 4)


def test_three_dimensions():
    run_torch(three_dimensions, 8)


def test_cut_by_torch():
    run_torch(cut_by_torch, 3)


def test_other_shape():
    run_torch(other_shape, 2)
