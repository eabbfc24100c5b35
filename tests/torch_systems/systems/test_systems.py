"""Systems of torch on our groups, one representative of each, equal to one process on all the data.

The others are :mod:`torch_systems.ddp`, ``test_compile`` and ``systems.test_elastic``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - torch's own acronym
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as attention
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_systems.small import Block, adam, batch, check, net, share, train, trained
from torch_world import run_torch

CPU = torch.device("cpu")
SPLIT = {
    f"{block}.{layer}": kind()
    for block in ("first", "second")
    for layer, kind in (("up", ColwiseParallel), ("down", RowwiseParallel))
}


def fsdp_hybrid(rank: int, size: int) -> None:
    """FSDP1 in two copies of two shards, over groups that the program has made."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = FSDP(
        net(), process_group=(rows[rank // 2], columns[rank % 2]), use_orig_params=True, device_id=CPU,
        auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
    )  # fmt: skip
    train(model, adam(model.parameters()), size, share(rank))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        check({name: value.clone() for name, value in model.state_dict().items()}, trained(net(), size))


def sharded(model: nn.Module | None = None, **options: object) -> nn.Module:
    model = model or net()
    for part in (model.first, model.second, model):
        fully_shard(part, **options)
    return model


def fully_sharded(rank: int, size: int) -> None:
    """Shards are uneven, some empty, and gradients are averaged; in copies over other backends, too."""
    meshes = [
        init_device_mesh("cpu", (size,)),
        init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("copies", "shards"),
            backend_override={"copies": "collectives_round_robin"},
        ),
    ]  # fmt: skip
    for mesh in meshes:
        model = sharded(mesh=mesh)
        train(model, adam(model.parameters()), size, share(rank))
        check(dict(model.state_dict()), trained(net(), size))


def divided(rank: int, size: int) -> None:
    """A factor of the program's own is multiplied in by PREMUL_SUM."""
    found = []
    for model, rows in ((sharded(), share(rank)), (net(), slice(None))):
        for part in (model, model.first, model.second) if not found else ():
            part.set_gradient_divide_factor(3.0)
        x, y = batch(0, size, 3)
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        found.append({name: one.grad for name, one in model.named_parameters()})
    check(found[0], {name: grad * size / 3 for name, grad in found[1].items()})


def tensor_parallel_in_shards(rank: int, size: int) -> None:
    """Tensor parallelism inside of pairs, sharded data parallelism between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = sharded(parallelize_module(net(even=True), mesh["tensor"], SPLIT), mesh=mesh["data"])
    train(model, adam(model.parameters()), 2, share(mesh.get_local_rank("data")), outputs=4)
    check(model.state_dict(), trained(net(even=True), 2, outputs=4))


def dtensors(rank: int, size: int) -> None:
    """Every layout to every other, also where ranks cannot share equally; partial ones, by each reduction."""
    mesh = init_device_mesh("cpu", (size,))
    layouts = (Shard(0), Shard(1), Replicate())
    for value in (
        torch.randn(8, 4, generator=torch.Generator().manual_seed(4)),
        torch.arange(15.0).view(5, 3),
    ):
        for source in layouts:
            given = distribute_tensor(value, mesh, [source])
            for target in layouts:
                moved = given.redistribute(mesh, [target])
                expected = distribute_tensor(value, mesh, [target], src_data_rank=None).to_local()
                assert torch.equal(moved.to_local(), expected)
    parts = torch.randn(size, 8, 3, generator=torch.Generator().manual_seed(4))
    for op, expected in (("sum", parts.sum(0)), ("avg", parts.mean(0)), ("max", parts.amax(0))):
        partial = DTensor.from_local(parts[rank].clone(), mesh, [Partial(op)])
        torch.testing.assert_close(partial.full_tensor(), expected)
        torch.testing.assert_close(
            partial.redistribute(mesh, [Shard(0)]).to_local(), expected.chunk(size)[rank]
        )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def context_parallel_attention(rank: int, size: int) -> None:
    """Each rank has a part of the sequence; keys and values go around, by both methods of torch."""
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(2, 2, 16, 8, generator=generator) for _ in range(3)]
    expected = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    for method in ("alltoall", "allgather"):
        attention.set_rotate_method(method)
        parts = [one.clone() for one in whole]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
            ring = attention._templated_ring_attention
            found = ring(mesh.get_group(), 2, attend, *parts, is_causal=True)[0]
            (together,) = attention.context_parallel_unshard(mesh, [found], [2])
        torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)


def pipelined(rank: int, size: int) -> None:
    """Two stages on each rank, in the shape of a V, whose backward passes put off the weights' gradients."""
    width, micro_batches, count = 4, 8, 2 * size
    torch.manual_seed(3)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))
    x, y = torch.randn(2, 2 * micro_batches, width, generator=torch.Generator().manual_seed(5))
    mine = [rank, count - 1 - rank]
    stages = [PipelineStage(copy.deepcopy(whole[i]), i, count, CPU) for i in mine]
    runner = ScheduleZBVZeroBubble(stages, micro_batches, loss_fn=nn.functional.mse_loss)
    ends = rank == 0  # it has the first stage and the last
    output = runner.step(*([x] if ends else []), target=y if ends else None, losses=[] if ends else None)
    expected = whole(x)
    nn.functional.mse_loss(expected, y).backward()
    assert not ends or torch.allclose(output, expected)
    for stage in stages:
        for one, other in zip(stage.submod.parameters(), whole[stage.stage_index].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def saved_while_training(rank: int, size: int, folder: str) -> None:
    """A thread writes a checkpoint over a group of its own while training goes on; other layouts load it."""
    own, model = dist.new_group(), sharded()
    optimizer = adam(model.parameters())
    train(model, optimizer, size, share(rank))
    writing = dcp.async_save(states(model, optimizer), checkpoint_id=folder, process_group=own)
    train(model, optimizer, size, share(rank), steps=range(3, 30))
    writing.result(timeout=30)
    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))):
        model = sharded(mesh=mesh)
        optimizer = adam(model.parameters())
        state = states(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(model, optimizer, size, share(rank), steps=range(3, 5))
        check(get_model_state_dict(model), trained(net(), size, steps=range(5)))


def zero_optimizer(rank: int, size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.05)
    train(model, optimizer, size, share(rank))
    check(model.module.state_dict(), trained(net(), size))
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        assert len(optimizer.state_dict()["state"]) == len(model.module.state_dict())


BODIES = [
    fsdp_hybrid, fully_sharded, divided, tensor_parallel_in_shards, dtensors, context_parallel_attention,
    pipelined, zero_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_system(body: Callable[[int, int], None]) -> None:
    run_torch(body, 4, isolated=True)  # torch keeps meshes of worlds that have ended


def test_checkpoint(tmp_path) -> None:
    run_torch(saved_while_training, 4, str(tmp_path), isolated=True)
