"""Backward passes of every kind: order of launch, overlap, several forwards, losses from elsewhere."""

from __future__ import annotations

import contextlib
import os
import warnings

import pytest
import torch
from ddp_oracle import (
    Chain,
    Marked,
    data,
    equal,
    grads,
    in_place_from,
    naive_average,
    naive_broadcast,
    pair,
    same_averages,
    same_pass,
)
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from collectives.ddp import DistributedDataParallel
from collectives.ddp.hooks.default_hooks import allreduce_hook

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


class Summed(nn.Module):
    """A sum of four branches, computed, and so differentiated, in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((3,), float(i + 1))) for i in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        total = torch.zeros(())
        for index in order:
            total = total + (x * self.weights[index]).sin().sum()
        return total


def different_orders(group, view):
    ours, naive = pair(group, Summed, bucket_cap_mb=0, gradient_as_bucket_view=view)
    ready, launched = [], []

    def hook(state, bucket):
        launched.append((bucket.index(), bucket.names()[0]))
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(group, hook)
    for name, parameter in ours.module.named_parameters():
        parameter.register_hook(lambda grad, name=name: ready.append(name))
    orders = [[0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2]]
    for step in range(3):
        order = orders[(group.rank() + step) % 3]
        ours.zero_grad()
        naive.zero_grad()
        ours(data(group.rank(), step), order).backward()
        naive(data(group.rank(), step), order).backward()
        assert same_averages(ours, naive)
    return ready, launched


@VIEWS
def test_buckets_launch_in_order_where_ranks_disagree_on_the_order_of_gradients(view) -> None:
    """Fig. 3(a) of the paper."""
    results = run_ranks(different_orders, 3, view, backend="host")
    assert len({tuple(ready) for ready, _ in results}) == 3
    launched = [launched for _, launched in results]
    assert launched[0] == launched[1] == launched[2]
    assert [index for index, _ in launched[0]] == [0, 1, 2, 3] * 3
    assert [name for _, name in launched[0][:4]] == [f"weights.{i}" for i in (3, 2, 1, 0)]
    assert [name for _, name in launched[0][4:8]] == results[0][0][:4], (
        "laid out again as rank 0's gradients came"
    )
    assert launched[0][4:8] == launched[0][8:]


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(2)
def test_reduction_starts_while_the_backward_pass_runs(group, batched):
    Marked.log = []
    ours, _ = pair(group, Chain, bucket_cap_mb=0.00004, batched_grad_copy=batched)

    def hook(state, bucket):
        Marked.log.append("launch " + "+".join(bucket.names()))
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(group, hook)
    ours(data(group.rank())).sum().backward()
    log = Marked.log
    assert log == [
        "after c",
        "launch c.bias+c.weight",
        "after b",
        "launch b.bias+b.weight",
        "after a",
        "launch a.bias+a.weight",
    ]


def with_batch_norm():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


@VIEWS
@on_ranks(2)
def test_several_forwards_before_their_backward_passes(group, view):
    ours, naive = pair(group, with_batch_norm, gradient_as_bucket_view=view)

    def outputs(model, step, buffers=False):
        found = []
        for part in range(2):
            if buffers:
                naive_broadcast(naive.buffers(), group)
            found.append(model(data(group.rank(), 2 * step + part, rows=4)))
        return found

    for step, pattern in enumerate(("one backward each", "reversed", "one loss", "twice")):
        for model in (ours, naive):
            model.zero_grad(set_to_none=step % 2 == 0)
            naively = model is naive
            first, second = outputs(model, step, naively)
            if pattern == "one loss":
                losses = [(first * second).sum()]
            elif pattern == "twice":
                losses = [first.sum(), first.sum()]
            elif pattern == "reversed":
                losses = [second.sum(), first.sum()]
            else:
                losses = [first.sum(), second.sum()]
            for loss in losses:
                loss.backward(retain_graph=True)
                if naively:
                    naive_average(naive.parameters(), group)
        assert equal(grads(ours.module), grads(naive))
    assert ours.reducer.passes == 7


@on_ranks(2)
def test_no_sync_is_decided_when_forward_runs_and_left_on_an_exception(group):
    """What a pass does is decided by its forward, wherever the pass runs."""
    ours, naive = pair(group)
    rank = group.rank()
    with ours.no_sync():
        inside = ours(data(rank, 0))
    outside = ours(data(rank, 1))
    inside.sum().backward()
    assert ours.reducer.passes == 0
    with ours.no_sync():
        outside.sum().backward()
    assert ours.reducer.passes == 1
    naive(data(rank, 0)).sum().backward()
    naive(data(rank, 1)).sum().backward()
    assert same_averages(ours, naive)
    with ours.no_sync():
        first = ours(data(rank, 2))
    (first * ours(data(rank, 3))).sum().backward()
    (naive(data(rank, 2)) * naive(data(rank, 3))).sum().backward()
    assert ours.reducer.passes == 2
    assert same_averages(ours, naive)
    with pytest.raises(KeyError), ours.no_sync():
        raise KeyError
    assert ours.require_backward_grad_sync


class Side(nn.Module):
    """Returns nothing that needs a gradient; the loss is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> str:
        self.loss = self.layer(x).sum()
        return "see loss"


@on_ranks(2)
def test_losses_from_elsewhere_and_gradients_of_inputs(group):
    rank = group.rank()
    ours, naive = pair(group, Side)
    ours(data(rank))
    ours.module.loss.backward()
    naive(data(rank))
    naive.loss.backward()
    assert same_averages(ours, naive)
    local = ours.module.layer.weight.sum()
    local.backward()
    naive.layer.weight.sum().backward()
    assert equal(grads(ours.module), grads(naive))
    assert ours.reducer.passes == 1

    ours, naive = pair(group)
    x = data(rank).requires_grad_()
    out = ours(x)
    inner = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    weights = torch.autograd.grad(out.sum(), list(ours.parameters()), retain_graph=True)
    assert (ours.reducer.passes, len(weights)) == (0, 4)
    assert [p.grad for p in ours.parameters()] == [None] * 4
    (out.sum() + inner.square().sum()).backward()
    y = data(rank).requires_grad_()
    out = naive(y)
    inner = torch.autograd.grad(out.sum(), y, create_graph=True)[0]
    (out.sum() + inner.square().sum()).backward()
    assert ours.reducer.passes == 1
    assert same_averages(ours, naive)

    x.grad = None
    ours(x).sum().backward(inputs=[x])
    assert ours.reducer.passes == 1
    assert x.grad is not None
    with torch.no_grad():
        assert not ours(x).requires_grad


@on_ranks(2)
def test_a_wrapper_lives_as_long_as_its_output_needs_it(group):
    """The wrapper is given up between forward and backward."""
    torch.manual_seed(group.rank())
    module, naive = nn.Linear(3, 3), nn.Linear(3, 3)
    out = DistributedDataParallel(module, process_group=group)(data(group.rank()))
    out.sum().backward()
    naive.load_state_dict(module.state_dict())
    naive(data(group.rank())).sum().backward()
    naive_average(naive.parameters(), group)
    assert equal(grads(module), grads(naive))


class Scaled(nn.Module):
    """Has a parameter that forward does not use, but the loss does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.tanh(self.layer(x))


@on_ranks(2)
def test_static_graph_with_parameters_outside_of_forward(group):
    """Feature DP-18: parameters that take part outside of forward, with a static graph."""
    ours, naive = pair(group, Scaled, static_graph=True)
    for step in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        for model, scale in ((ours, ours.module.scale), (naive, naive.scale)):
            model.zero_grad()
            (model(x) * scale).sum().backward()
        assert same_averages(ours, naive)


@VIEWS
@on_ranks(2)
def test_backward_that_records_a_graph(group, view):
    ours, naive = pair(group, gradient_as_bucket_view=view)
    for model in (ours, naive):
        x = data(group.rank())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that gradients with graphs make cycles
            model(x).square().sum().backward(create_graph=True)
    assert same_averages(ours, naive)
    for model in (ours, naive):
        model.zero_grad()


@VIEWS
@pytest.mark.parametrize("in_place", [False, True])
@on_ranks(2)
def test_what_hooks_of_the_user_make_of_a_gradient_is_averaged(group, view, in_place):
    """Clips each gradient as it comes, by hooks registered before and after wrapping."""
    naive = Chain()
    torch.manual_seed(5)
    module = Chain()
    naive.load_state_dict(module.state_dict())

    def clip(parameter):
        parameter.grad.clamp_(-0.1, 0.1)

    def double(parameter):
        parameter.grad.mul_(2)

    for model in (module, naive):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
    with in_place_from(0) if in_place else contextlib.nullcontext():
        ours = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=0, gradient_as_bucket_view=view
        )
        for model in (module, naive):
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(double)
        assert all(same_pass(ours, naive, data(group.rank(), step)) for step in range(3))


class Odd(nn.Module):
    """Parameters without elements, and one of them last, beside a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer = nn.Linear(3, 3)
        self.last = nn.Parameter(torch.ones(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale) + self.first.sum() + self.last.sum()


@pytest.mark.parametrize("backend", ["host", "gloo"])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}], ids=str)
@on_ranks(2, asked="backend")
def test_parameters_without_elements(group, options):
    ours, naive = pair(group, Odd, **options)
    for step in range(3):
        for model in (ours, naive):
            model(data(group.rank(), step)).square().sum().backward()
        assert same_averages(ours, naive)


def under_dist_autograd(group, folder, remote):
    rank, size = group.rank(), group.size()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", _transports=["uv"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    ours, naive = pair(group)
    message = ""
    with dist_autograd.context() as context:
        output = ours(data(rank))
        if remote:
            output = rpc.rpc_sync(f"rank{(rank + 1) % size}", torch.square, (output,))
        try:
            dist_autograd.backward(context, [output.sum()])
        except RuntimeError as error:
            message = str(error)
        group.barrier().wait()
    rpc.shutdown()
    assert "torch.distributed.autograd.backward() keeps gradients in its context" in message
    ours(data(rank, 1)).sum().backward()
    naive(data(rank, 1)).sum().backward()
    assert same_averages(ours, naive)


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_dist_autograd_is_refused(tmp_path, remote) -> None:
    run_ranks(under_dist_autograd, 2, str(tmp_path), remote, backend="host")
