"""DTensors of torch over our groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    zeros,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch_systems.small import adam, check, net, train, trained
from torch_world import run_torch

REDUCED = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "product": lambda parts: parts.prod(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


def line():
    return init_device_mesh("cpu", (4,))


def whole(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def same_everywhere(tensor):
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    assert all(torch.equal(found[0], other) for other in found)


def redistributed(rank, size):
    """Every layout to every other, with rows and columns that 4 ranks share equally, and not."""
    mesh = line()
    for shape in ((8, 4), (5, 3)):
        value = whole(*shape)
        for source in (Shard(0), Shard(1), Replicate()):
            given = distribute_tensor(value, mesh, [source])
            assert torch.equal(given.full_tensor(), value)
            for target in (Shard(0), Shard(1), Replicate()):
                moved = given.redistribute(mesh, [target])
                assert moved.placements == (target,)
                expected = distribute_tensor(value, mesh, [target], src_data_rank=None).to_local()
                assert torch.equal(moved.to_local(), expected)


def reduced(rank, size):
    """What ranks hold parts of, under every reduction of torch."""
    mesh, parts = line(), whole(size, 8, 3)
    for operation, function in REDUCED.items():
        partial = DTensor.from_local(parts[rank].clone(), mesh, [Partial(operation)])
        expected = function(parts)
        torch.testing.assert_close(partial.full_tensor(), expected)
        same_everywhere(partial.full_tensor())
        shard = partial.redistribute(mesh, [Shard(0)])
        torch.testing.assert_close(shard.to_local(), expected.chunk(size)[rank])


def two_dimensions(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    value = whole(6, 5)
    tile = distribute_tensor(value, mesh, [Shard(0), Shard(1)])
    assert tile.to_local().shape == (3, 3 if rank % 2 == 0 else 2)
    for placements in (
        [Shard(1), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate()] * 2,
    ):
        assert torch.equal(tile.redistribute(mesh, placements).full_tensor(), value)


def differentiated(rank, size):
    """Gradients go through redistributions and products of matrices."""
    mesh = line()
    left, right = whole(8, 4).requires_grad_(), whole(4, 8).requires_grad_()
    (left @ right).tanh().sum().backward()
    rows = distribute_tensor(left.detach(), mesh, [Shard(0)]).requires_grad_()
    columns = distribute_tensor(right.detach(), mesh, [Shard(1)]).requires_grad_()
    product = rows.redistribute(mesh, [Replicate()]) @ columns
    assert product.placements == (Shard(1),)
    product.redistribute(mesh, [Shard(0)], async_op=True).tanh().sum().redistribute(
        mesh, [Replicate()]
    ).backward()
    torch.testing.assert_close(rows.grad.full_tensor(), left.grad)
    torch.testing.assert_close(columns.grad.full_tensor(), right.grad)


def run_check(rank, size):
    """``run_check`` brings the replicas to the first rank's values."""
    given = torch.full((3,), float(rank))
    replica = DTensor.from_local(given, line(), [Replicate()], run_check=True)
    assert torch.equal(replica.to_local(), torch.zeros(3))


def sharded_module(rank, size):
    """A module's parameters in shards, the activations replicated."""
    mesh = line()

    def shard(name, module, mesh):
        for key, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))

    expected = trained(net(), size)
    model = distribute_module(
        net(), mesh, shard,
        input_fn=lambda module, inputs, mesh: (
            DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False), *inputs[1:],
        ),
        output_fn=lambda module, output, mesh: output.redistribute(mesh, [Replicate()]).to_local(),
    )  # fmt: skip

    def lay_out_gradients():
        """AdamW takes them in the layout of the parameters only."""
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(mesh, parameter.placements)

    train(model, adam(model.parameters()), size, before_step=lay_out_gradients)
    check(model.state_dict(), expected)


def factories(rank, size):
    made = zeros(10, 3, device_mesh=line(), placements=[Shard(0)])
    assert made.to_local().shape == ((3, 3, 3, 1)[rank], 3)
    assert torch.equal((made + 1).full_tensor(), torch.ones(10, 3))


def counted(rank, size):
    mesh = line()
    given = distribute_tensor(whole(8, 4), mesh, [Shard(0)])
    with CommDebugMode() as mode:
        given.full_tensor()
        given.sum(0).full_tensor()
    counts = {str(kind).rsplit(".", 1)[-1]: count for kind, count in mode.get_comm_counts().items()}
    assert counts == {"all_gather_into_tensor": 1, "all_reduce": 1}


@pytest.mark.parametrize(
    "body",
    [
        redistributed, reduced, two_dimensions, differentiated, run_check, sharded_module, factories, counted,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_dtensor(body):
    run_torch(body, 4)
