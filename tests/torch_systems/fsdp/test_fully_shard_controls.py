"""What ``fully_shard`` of torch lets a program steer, over our groups: when it communicates, and what."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch_systems.small import Block, batch, check, net, share
from torch_world import run_torch

GATHER, SCATTER, REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allreduce_"


def sharded(**options):
    model = net()
    for block in (model.first, model.second):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss(model, size, rows=slice(None), step=0):
    x, y = batch(step, size, 3)
    return nn.functional.mse_loss(model(x[rows]), y[rows])


def counted(body):
    """Returns how often each operator of c10d was called."""
    with CommDebugMode() as mode:
        body()
    return {str(kind): count for kind, count in mode.get_comm_counts().items()}


def gradients(model):
    return {name: one.grad for name, one in model.named_parameters()}


def expected_gradients(size, steps=(0,)):
    oracle = net()
    for step in steps:
        loss(oracle, size, step=step).backward()
    return gradients(oracle)


def one_group_for_each_call(rank, size):
    """Each call gathers once before forward and once before backward, and scatters once; the rest is less."""
    rows = share(rank)
    model = sharded()
    step = counted(lambda: loss(model, size, rows).backward())
    assert step == {GATHER: 4, SCATTER: 2}, step  # the root has no parameters of its own
    check(gradients(model), expected_gradients(size))

    model.zero_grad()
    model.set_reshard_after_forward(False)
    assert counted(lambda: loss(model, size, rows).backward()) == {GATHER: 2, SCATTER: 2}
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    assert counted(lambda: loss(model, size, rows).backward()) == {GATHER: 2}
    assert counted(lambda: loss(model, size, rows).backward()) == {}  # all parameters have stayed whole
    assert not isinstance(model.first.up.weight, DTensor)
    model.reshard()
    model.first.reshard()
    assert isinstance(model.first.up.weight, DTensor)

    alone = fully_shard(net())
    assert counted(lambda: loss(alone, size, rows).backward()) == {GATHER: 1, SCATTER: 1}
    check(gradients(alone), expected_gradients(size))


def not_unsharded_in_backward(rank, size):
    """A module whose backward needs no parameters is not gathered for it."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    words = torch.arange(6)
    assert counted(lambda: model(words).sum().backward())[GATHER] == 4
    model[0].set_unshard_in_backward(False)
    assert counted(lambda: model(words).sum().backward())[GATHER] == 3


def steered_hybrid(rank, size):
    """Replicas add their gradients up over two batches, and reduce them among each other once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, rows = sharded(mesh=mesh), share(rank)
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(False)
    first = counted(lambda: loss(model, size, rows, 0).backward())
    assert first == {GATHER: 4, SCATTER: 2}
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    last = counted(lambda: loss(model, size, rows, 1).backward())
    assert (last[SCATTER], last[REDUCE]) == (2, 2)
    check(gradients(model), expected_gradients(size, (0, 1)))
    return last


def order_of(model, size, rows):
    """Returns in which order modules are gathered and run forwards, then backwards."""
    events, handles = [], []
    for name in ("first", "second"):
        module = getattr(model, name)
        handles.append(module.down.register_forward_hook(lambda *_, name=name: events.append(f"{name} runs")))
        handles.append(
            module.down.register_full_backward_hook(lambda *_, name=name: events.append(f"{name} returns"))
        )
        module.set_custom_all_gather(_Noted(name, events))
    loss(model, size, rows).backward()
    for handle in handles:
        handle.remove()
    return events


class _Noted:
    """Gathers as FSDP does, and notes for which module."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.events.append(f"gather {self.name}")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def prefetched(rank, size):
    rows = share(rank)
    plain, early = sharded(), sharded()
    early.first.set_modules_to_forward_prefetch([early.second])
    early.second.set_modules_to_backward_prefetch([early.first])
    before = order_of(plain, size, rows)
    assert before[:4] == ["gather first", "first runs", "gather second", "second runs"]
    after = order_of(early, size, rows)
    assert after[:4] == ["gather first", "gather second", "first runs", "second runs"]
    assert after.index("gather first", 1) < after.index("second returns")
    event = torch.cpu.Event()
    early.set_post_optim_event(event)
    with mock.patch.object(torch.cpu.Stream, "wait_event") as wait:
        for model in (plain, early, early):
            model.zero_grad()
            loss(model, size, rows).backward()
            check(gradients(model), expected_gradients(size))
    assert wait.call_args_list.count(mock.call(event)) == 2  # on both streams, in one step only


class Scored(Block):
    """A block with a second way in."""

    def score(self, x):
        return self(x).sum()


def kinds_and_names(rank, size):
    """The class of a module changes in place, its names and its state's do not; parts can be left out."""
    model = net()
    names, kinds = list(model.state_dict()), [type(model), type(model.first)]
    kept = model.second.down.bias
    fully_shard(model.first)
    fully_shard(model, ignored_params={kept})
    assert isinstance(model, FSDPModule)
    assert isinstance(model, kinds[0])
    assert isinstance(model.first, FSDPModule)
    assert isinstance(model.first, kinds[1])
    assert not isinstance(model.second, FSDPModule)
    assert list(model.state_dict()) == names == [name for name, _ in model.named_parameters()]
    assert model.second.down.bias is kept
    loss(model, size, share(rank)).backward()
    expected, found = expected_gradients(size), gradients(model)
    mine = found.pop("second.down.bias")  # nobody reduces it but its owner
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    whole = expected.pop("second.down.bias")
    check(found, expected)
    torch.testing.assert_close(mine, whole)

    torch.manual_seed(3)
    block = fully_shard(Scored(4, 6, 2))
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        block.forward(x)  # past the hooks, and so with sharded parameters
    handle = block.unshard(async_op=True)
    handle.wait()
    by_hand = block.forward(x).sum()
    block.reshard()
    register_fsdp_forward_method(block, "score")
    assert torch.equal(block.score(x), by_hand)
    assert isinstance(block.up.weight, DTensor)
    with pytest.raises(ValueError, match="does not have a method nothing"):
        register_fsdp_forward_method(block, "nothing")


BODIES = [one_group_for_each_call, not_unsharded_in_backward, prefetched, kinds_and_names]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_controls(body):
    run_torch(body, 2)


def test_steered_hybrid():
    assert run_torch(steered_hybrid, 4) == run_torch(steered_hybrid, 4, backend="gloo")
