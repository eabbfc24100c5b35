"""Tensor, sequence and loss parallelism of torch over our groups, equal to one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch_systems.small import adam, check, net, share, train, trained
from torch_world import run_torch

PLAN = {
    "first.up": ColwiseParallel(),
    "first.down": RowwiseParallel(),
    "second.up": ColwiseParallel(),
    "second.down": RowwiseParallel(),
}
WORDS, WIDTH, LENGTH = 12, 8, 8


def linear_layers(rank, size):
    """Columns of the first, rows of the second layer of each block; every rank has all of the data."""
    expected = trained(net(even=True), size, outputs=4)
    model = parallelize_module(net(even=True), init_device_mesh("cpu", (4,)), PLAN)
    assert model.first.up.weight.to_local().shape == (4, 4)
    train(model, adam(model.parameters()), size, outputs=4)
    check(model.state_dict(), expected)


def with_fully_shard(rank, size):
    """Tensor parallelism inside of pairs, sharded data parallelism between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    expected = trained(net(even=True), 2, outputs=4)
    model = parallelize_module(net(even=True), mesh["tensor"], PLAN)
    for block in (model.first, model.second):
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    train(model, adam(model.parameters()), 2, share(mesh.get_local_rank("data")), outputs=4)
    check(model.state_dict(), expected)


class Language(nn.Module):
    """Words to scores of words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(words)
        return self.scores(x + self.down(torch.relu(self.up(self.norm(x)))))


def language():
    torch.manual_seed(2)
    return Language()


def sentences():
    generator = torch.Generator().manual_seed(6)
    return torch.randint(WORDS, (2, 2, LENGTH), generator=generator)


def learn(model, steps=3):
    optimizer = adam(model.parameters())
    words, following = sentences()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    return model.state_dict()


def sequences_and_loss(rank, size):
    """The embedding by rows, the norm over shards of the sequence, the loss over shards of the classes."""
    expected = learn(language())
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "scores": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(language(), init_device_mesh("cpu", (4,)), plan)
    with loss_parallel():
        found = learn(model)
    check(found, expected)


def prepared_inputs_and_outputs(rank, size):
    mesh = init_device_mesh("cpu", (4,))
    layer, x = nn.LayerNorm(WIDTH), torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    plan = [
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
    ]
    for style in plan:
        parallelize_module(layer, mesh, style)
    for name, value in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Replicate()])))
    found = layer(x[rank : rank + 1])
    torch.testing.assert_close(found, nn.functional.layer_norm(x, (WIDTH,))[rank : rank + 1])


class Mixed(nn.Module):
    """Takes positions and a keyword, gives two tensors."""

    def forward(self, x, plain, *, weights):
        y = x @ weights
        return y, y.sum(0) + plain


def prepared_on_both_sides(rank, size):
    """Positional and keyword inputs, and outputs, each in the layout that is asked for."""
    mesh, generator = init_device_mesh("cpu", (4,)), torch.Generator().manual_seed(1)
    x, weights = torch.randn(8, 4, generator=generator), torch.randn(4, 6, generator=generator)
    seen = []
    style = PrepareModuleInputOutput(
        input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"weights": Shard(0)}, desired_input_kwarg_layouts={"weights": Shard(1)},
        output_layouts=(Shard(1), Shard(0)), desired_output_layouts=(Shard(0), Replicate()),
        use_local_output=False,
    )  # fmt: skip
    plan_module = Mixed()
    plan_module.register_forward_hook(lambda _, inputs, kwargs, __: seen.append((*inputs, kwargs["weights"])),
                                      with_kwargs=True)  # fmt: skip
    parallelize_module(plan_module, mesh, style)
    y, total = plan_module(x[2 * rank : 2 * rank + 2], 1.5, weights=weights[rank : rank + 1])
    ((given, plain, columns),) = seen
    assert (given.placements, columns.placements, plain) == ((Replicate(),), (Shard(1),), 1.5)
    assert (y.placements, total.placements) == ((Shard(0),), (Replicate(),))
    torch.testing.assert_close(y.full_tensor(), x @ weights)
    torch.testing.assert_close(total.to_local(), (x @ weights).sum(0) + 1.5)
    with pytest.raises(AssertionError, match="desired_input_layouts"):
        PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(0), None))


def uneven_activations(rank, size):
    """Activations that do not divide by the ranks come as DTensors, which know their shape."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(3)
    up, down = nn.Linear(4, 6), nn.Linear(6, 3)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    y = torch.nn.functional.relu(up(x))
    expected = down(y)
    expected.square().sum().backward()
    grads = [one.grad.clone() for one in (*up.parameters(), *down.parameters())]
    model = nn.Sequential(up, nn.ReLU(), down)
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    model.zero_grad()
    found = model(distribute_tensor(x, mesh, [Shard(0)]))
    assert found.to_local().shape == ((2, 2, 1, 0)[rank], 3)
    torch.testing.assert_close(found.full_tensor(), expected)
    found.square().sum().redistribute(mesh, [Replicate()]).backward()
    for one, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), grad)


@pytest.mark.parametrize(
    "body",
    [
        linear_layers,
        with_fully_shard,
        sequences_and_loss,
        prepared_inputs_and_outputs,
        prepared_on_both_sides,
        uneven_activations,
    ],
    ids=lambda body: body.__name__,
)
def test_parallel(body):
    run_torch(body, 4)
