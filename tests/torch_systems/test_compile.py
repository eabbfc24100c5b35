"""``torch.compile`` of code that communicates over our groups, equal to the same code run eagerly."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sources import SAFE_PATH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_systems.small import adam, batch, check, net, share, train, trained
from torch_world import run_torch

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("preloaded_python")]


def collectives(x, group):
    """Every functional collective, some of whose results others need."""
    total = functional.all_reduce(x.sin(), "sum", group)
    most = functional.all_reduce(x, "max", group) - total
    rows = functional.all_gather_tensor(most * 2, 0, group)
    part = functional.reduce_scatter_tensor(rows, "avg", 0, group)
    one, two = functional.all_reduce_coalesced([part, x], "sum", group)
    turned = functional.all_to_all_single(rows, None, None, group)
    return one + two, turned, functional.broadcast(x + 1, 1, group)


def functional_collectives(rank, size):
    """The whole function is one graph, and what it returns is what it returns uncompiled."""
    group = dist.group.WORLD
    compiled = torch.compile(collectives, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(4 * seed + rank))
        for found, expected in zip(compiled(x, group), collectives(x, group), strict=True):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def of_torch_distributed(rank, size):
    """Dynamo turns calls of ``torch.distributed`` into functional ones."""

    def step(x):
        y = x * 2
        dist.all_reduce(y)
        rows = torch.empty(size * 3)
        dist.all_gather_into_tensor(rows, y)
        return rows + 1

    found = torch.compile(step, backend="aot_eager")(torch.full((3,), float(rank)))
    assert torch.equal(found, torch.full((3 * size,), size * (size - 1) + 1.0))


def over_a_mesh(rank, size):
    """A group is named by a dimension of a mesh, and gradients pass through."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def loss(x):
        rows = functional.all_gather_tensor_autograd(x, 0, (mesh, 1))
        return functional.reduce_scatter_tensor_autograd(rows.square(), "sum", 0, (mesh, 0)).sum()

    results = []
    for run in (loss, torch.compile(loss, backend="aot_eager")):
        x = torch.arange(4.0).add(rank).requires_grad_()
        value = run(x)
        value.backward()
        results.append((value.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def graphs_of_data_parallel(rank, size):
    """Returns the numbers of graphs with small buckets, with one, and unbroken; gradients are right."""
    oracle, counts = net(), []
    nn.functional.mse_loss(oracle(batch(0, size, 3)[0]), batch(0, size, 3)[1]).backward()
    expected = {name: one.grad for name, one in oracle.named_parameters()}
    for broken, megabytes in ((True, 0.0001), (True, 25), (False, 0.0001)):
        graphs = []

        def note(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        small = mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(megabytes * 2**20))
        with small, torch._dynamo.config.patch(optimize_ddp=broken):
            torch._dynamo.reset()
            model = DistributedDataParallel(net(), bucket_cap_mb=megabytes)
            compiled = torch.compile(model, backend=note)
            for _ in range(2):  # the second time nothing is compiled anew
                model.zero_grad()
                x, y = (part[share(rank)] for part in batch(0, size, 3))
                nn.functional.mse_loss(compiled(x), y).backward()
                check({name: one.grad for name, one in model.module.named_parameters()}, expected)
        counts.append(len(graphs))
    return counts


def fully_sharded(rank, size):
    from torch.distributed.fsdp import fully_shard  # ranks have it; those who only collect tests need not

    expected = trained(net(), size)
    model = net()
    for part in (model.first, model.second, model):
        fully_shard(part)
    train(torch.compile(model, backend="aot_eager"), adam(model.parameters()), size, share(rank))
    check(model.state_dict(), expected)


@pytest.mark.parametrize(
    "body",
    [functional_collectives, of_torch_distributed, over_a_mesh, fully_sharded],
)
def test_compile(body):
    run_torch(body, 2 if body is not over_a_mesh else 4)


def test_graphs_of_data_parallel():
    """Where a bucket ends a graph ends, so that its gradients are there before those of the next."""
    for of_buckets, of_one_bucket, unbroken in run_torch(graphs_of_data_parallel, 2):
        assert of_buckets > 2
        assert (of_one_bucket, unbroken) == (1, 1)


MISSING = """
import sys
import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

kept = eval_frame._FrameExecStrategy
del eval_frame._FrameExecStrategy
import collectives.torch_bridge.creation  # finds it missing
eval_frame._FrameExecStrategy = kept

where, rank = f"file://{sys.argv[1]}", int(sys.argv[2])
dist.init_process_group("collectives", where, rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for run in (torch.compile(model, backend="aot_eager"), model):
    for _ in range(3):
        model.zero_grad()
        run(torch.ones(3, 4) * dist.get_rank()).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5] * 4] * 2
dist.destroy_process_group()
print("trained")
"""


def test_without_names_that_are_not_public(tmp_path):
    """A torch that lacks what keeps Dynamo out of the group's methods trains all the same."""
    script = tmp_path / "program.py"
    script.write_text(MISSING)
    command = [sys.executable, *SAFE_PATH, str(script), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=100)
            assert (rank.returncode, output) == (0, "trained\n"), errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
