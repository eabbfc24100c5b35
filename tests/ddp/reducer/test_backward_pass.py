"""Backward passes of every kind: order of launch, overlap, several forwards, checkpointing."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from ddp_oracle import Chain, Marked, data, equal, grads, naive_average, naive_broadcast, pair
from harness import run_ranks
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.utils.checkpoint import checkpoint

from collectives.ddp import DistributedDataParallel, GradientSyncError
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
    same = []
    for step in range(3):
        order = orders[(group.rank() + step) % 3]
        ours.zero_grad()
        naive.zero_grad()
        ours(data(group.rank(), step), order).backward()
        naive(data(group.rank(), step), order).backward()
        naive_average(naive.parameters(), group)
        same.append(equal(grads(ours.module), grads(naive)))
    return same, ready, launched


@VIEWS
def test_buckets_launch_in_order_where_ranks_disagree_on_the_order_of_gradients(view) -> None:
    """Fig. 3(a) of the paper."""
    results = run_ranks(different_orders, 3, view, backend="host")
    assert all(same == [True] * 3 for same, _, _ in results)
    assert len({tuple(ready) for _, ready, _ in results}) == 3
    launched = [launched for _, _, launched in results]
    assert launched[0] == launched[1] == launched[2]
    assert [index for index, _ in launched[0]] == [0, 1, 2, 3] * 3
    assert [name for _, name in launched[0][:4]] == [f"weights.{i}" for i in (3, 2, 1, 0)]
    assert [name for _, name in launched[0][4:8]] == results[0][1][:4], (
        "laid out again as rank 0's gradients came"
    )
    assert launched[0][4:8] == launched[0][8:]


def overlapping(group, batched):
    Marked.log = []
    ours, _ = pair(group, Chain, bucket_cap_mb=0.00004, batched_grad_copy=batched)

    def hook(state, bucket):
        Marked.log.append("launch " + "+".join(bucket.names()))
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(group, hook)
    ours(data(group.rank())).sum().backward()
    return Marked.log


@pytest.mark.parametrize("batched", [False, True])
def test_reduction_starts_while_the_backward_pass_runs(batched) -> None:
    for log in run_ranks(overlapping, 2, batched, backend="host"):
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


def several_forwards(group, view):
    ours, naive = pair(group, with_batch_norm, gradient_as_bucket_view=view)
    same = []

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
        same.append(equal(grads(ours.module), grads(naive)))
    return same, ours.reducer.passes


@VIEWS
def test_several_forwards_before_their_backward_passes(view) -> None:
    for same, passes in run_ranks(several_forwards, 2, view, backend="host"):
        assert same == [True] * 4
        assert passes == 7


def forward_decides(group):
    """What a pass does is decided by its forward, wherever the pass runs."""
    ours, naive = pair(group)
    rank = group.rank()
    with ours.no_sync():
        inside = ours(data(rank, 0))
    outside = ours(data(rank, 1))
    found = []
    inside.sum().backward()
    found.append(ours.reducer.passes)
    with ours.no_sync():
        outside.sum().backward()
    found.append(ours.reducer.passes)
    naive(data(rank, 0)).sum().backward()
    naive(data(rank, 1)).sum().backward()
    naive_average(naive.parameters(), group)
    found.append(equal(grads(ours.module), grads(naive)))
    with ours.no_sync():
        first = ours(data(rank, 2))
    (first * ours(data(rank, 3))).sum().backward()
    (naive(data(rank, 2)) * naive(data(rank, 3))).sum().backward()
    naive_average(naive.parameters(), group)
    found += [ours.reducer.passes, equal(grads(ours.module), grads(naive))]
    with pytest.raises(KeyError), ours.no_sync():
        raise KeyError
    return [*found, ours.require_backward_grad_sync]


def test_no_sync_is_decided_when_forward_runs_and_left_on_an_exception() -> None:
    assert run_ranks(forward_decides, 2, backend="host") == [[0, 1, True, 2, True, True]] * 2


class Side(nn.Module):
    """Returns nothing that needs a gradient; the loss is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> str:
        self.loss = self.layer(x).sum()
        return "see loss"


def unusual_sources(group):
    rank = group.rank()
    ours, naive = pair(group, Side)
    ours(data(rank))
    ours.module.loss.backward()
    naive(data(rank))
    naive.loss.backward()
    naive_average(naive.parameters(), group)
    found = [equal(grads(ours.module), grads(naive))]
    local = ours.module.layer.weight.sum()
    local.backward()
    naive.layer.weight.sum().backward()
    found.append((equal(grads(ours.module), grads(naive)), ours.reducer.passes))

    ours, naive = pair(group)
    x = data(rank).requires_grad_()
    out = ours(x)
    inner = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    weights = torch.autograd.grad(out.sum(), list(ours.parameters()), retain_graph=True)
    found.append((ours.reducer.passes, len(weights), [p.grad for p in ours.parameters()] == [None] * 4))
    (out.sum() + inner.square().sum()).backward()
    y = data(rank).requires_grad_()
    out = naive(y)
    inner = torch.autograd.grad(out.sum(), y, create_graph=True)[0]
    (out.sum() + inner.square().sum()).backward()
    naive_average(naive.parameters(), group)
    found.append((ours.reducer.passes, equal(grads(ours.module), grads(naive))))

    x.grad = None
    ours(x).sum().backward(inputs=[x])
    found.append((ours.reducer.passes, x.grad is not None))
    with torch.no_grad():
        found.append(ours(x).requires_grad)
    return found


def test_losses_from_elsewhere_and_gradients_of_inputs() -> None:
    for found in run_ranks(unusual_sources, 2, backend="host"):
        assert found == [True, (True, 1), (0, 4, True), (1, True), (1, True), False]


def temporary_module(group):
    """The wrapper is given up between forward and backward."""
    torch.manual_seed(group.rank())
    module, naive = nn.Linear(3, 3), nn.Linear(3, 3)
    out = DistributedDataParallel(module, process_group=group)(data(group.rank()))
    out.sum().backward()
    naive.load_state_dict(module.state_dict())
    naive(data(group.rank())).sum().backward()
    naive_average(naive.parameters(), group)
    return equal(grads(module), grads(naive))


def test_a_wrapper_lives_as_long_as_its_output_needs_it() -> None:
    assert run_ranks(temporary_module, 2, backend="host") == [True, True]


class Checkpointed(nn.Module):
    """Checkpointed layers, one of them run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last, self.spare = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, reentrant: bool, times: int, spare: bool = True) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.shared, x, use_reentrant=reentrant)
        x = checkpoint(self.last, x, use_reentrant=reentrant)
        return self.spare(x) if spare else x


def checkpointed(group, reentrant, times, spare, options):
    ours, naive = pair(group, Checkpointed, bucket_cap_mb=0, **options)
    same = []
    for step in range(3):
        for model in (ours, naive):
            model.zero_grad()
            model(data(group.rank(), step), reentrant, times, spare).sum().backward()
        naive_average(naive.parameters(), group)
        same.append(equal(grads(ours.module), grads(naive)))
    return same


@pytest.mark.parametrize(
    ("reentrant", "times", "spare", "options"),
    [
        (False, 2, True, {}),
        (False, 2, False, {"find_unused_parameters": True}),
        (True, 1, True, {}),
        (True, 1, False, {"find_unused_parameters": True}),
        (True, 2, True, {"static_graph": True}),
        (True, 3, False, {"static_graph": True}),
        (True, 3, False, {"static_graph": True, "gradient_as_bucket_view": True, "batched_grad_copy": True}),
    ],
)
def test_activation_checkpointing(reentrant, times, spare, options) -> None:
    for same in run_ranks(checkpointed, 2, reentrant, times, spare, options, backend="host"):
        assert same == [True] * 3


def repeated(group, static):
    ours, _ = pair(group, Checkpointed, static_graph=static)
    times = 1 + (group.rank() == 1)
    if static:
        ours(data(group.rank()), True, 1).sum().backward()
    with pytest.raises(GradientSyncError) as caught:
        ours(data(group.rank()), True, times).sum().backward()
    return str(caught.value), caught.value.reasons


@pytest.mark.parametrize("static", [False, True])
def test_gradients_that_come_again_are_named(static) -> None:
    for message, reasons in run_ranks(repeated, 2, static, backend="host"):
        assert list(reasons) == [1]
        assert "2 of 8 parameters got" in reasons[1]
        assert "shared.weight" in reasons[1]
        assert ("leave it out" if static else "use_reentrant=False") in message


def static_and_unused(group):
    """Unused parameters and ``no_sync`` with a static graph: what torch refuses or gets wrong."""
    ours, naive = pair(group, Checkpointed, static_graph=True)
    same = []
    for step in range(4):
        spare = group.rank() == 0
        for model in (ours, naive):
            if step % 2:
                model.zero_grad()
            elif model is ours:
                with ours.no_sync():
                    ours(data(group.rank(), 9 + step), False, 1, spare).sum().backward()
            else:
                naive(data(group.rank(), 9 + step), False, 1, spare).sum().backward()
            model(data(group.rank(), step), False, 1, spare).sum().backward()
        naive_average(naive.parameters(), group)
        same.append(equal(grads(ours.module), grads(naive)))
    return same, ours._get_ddp_logging_data()["can_set_static_graph"]


def test_static_graph_with_unused_parameters_and_no_sync() -> None:
    assert run_ranks(static_and_unused, 2, backend="host") == [([True] * 4, True)] * 2


class Scaled(nn.Module):
    """Has a parameter that forward does not use, but the loss does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.tanh(self.layer(x))


def outside_of_forward(group):
    """Feature DP-18: parameters that take part outside of forward, with a static graph."""
    ours, naive = pair(group, Scaled, static_graph=True)
    same = []
    for step in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        for model, scale in ((ours, ours.module.scale), (naive, naive.scale)):
            model.zero_grad()
            (model(x) * scale).sum().backward()
        naive_average(naive.parameters(), group)
        same.append(equal(grads(ours.module), grads(naive)))
    return same


def test_static_graph_with_parameters_outside_of_forward() -> None:
    assert run_ranks(outside_of_forward, 2, backend="host") == [[True] * 3] * 2


def double_backward(group, view):
    ours, naive = pair(group, gradient_as_bucket_view=view)
    for model in (ours, naive):
        x = data(group.rank())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that gradients with graphs make cycles
            model(x).square().sum().backward(create_graph=True)
    naive_average(naive.parameters(), group)
    same = equal(grads(ours.module), grads(naive))
    for model in (ours, naive):
        model.zero_grad()
    return same


@VIEWS
def test_backward_that_records_a_graph(view) -> None:
    assert run_ranks(double_backward, 2, view, backend="host") == [True, True]


def hooks_of_the_user(group, view, in_place):
    """Clips each gradient as it comes, by hooks registered before and after wrapping."""
    from collectives.ddp.reducer import gradients

    before = gradients.IN_PLACE_BYTES
    gradients.IN_PLACE_BYTES = 0 if in_place else before
    try:
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
        ours = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=0, gradient_as_bucket_view=view
        )
        for model in (module, naive):
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(double)
        same = []
        for step in range(3):
            for model in (ours, naive):
                model.zero_grad()
                model(data(group.rank(), step)).sum().backward()
            naive_average(naive.parameters(), group)
            same.append(equal(grads(module), grads(naive)))
        return same
    finally:
        gradients.IN_PLACE_BYTES = before


@VIEWS
@pytest.mark.parametrize("in_place", [False, True])
def test_what_hooks_of_the_user_make_of_a_gradient_is_averaged(view, in_place) -> None:
    for same in run_ranks(hooks_of_the_user, 2, view, in_place, backend="host"):
        assert same == [True] * 3


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


def odd_sizes(group, options):
    ours, naive = pair(group, Odd, **options)
    same = []
    for step in range(3):
        for model in (ours, naive):
            model(data(group.rank(), step)).square().sum().backward()
        naive_average(naive.parameters(), group)
        same.append(equal(grads(ours.module), grads(naive)))
    return same


@pytest.mark.parametrize("backend_name", ["host", "gloo"])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}], ids=str)
def test_parameters_without_elements(options, backend_name) -> None:
    for same in run_ranks(odd_sizes, 2, options, backend=backend_name):
        assert same == [True] * 3


class Deep(nn.Module):
    """A checkpoint within a checkpoint, deeper than the engine goes on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(70))

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        if first == len(self.layers):
            return x
        return checkpoint(lambda y: self(torch.tanh(self.layers[first](y)), first + 1), x, use_reentrant=True)


def deep_checkpoints(group, static):
    ours, naive = pair(group, Deep, static_graph=static, bucket_cap_mb=0.0005)
    same = []
    for step in range(2):
        for model in (ours, naive):
            model.zero_grad()
            model(data(group.rank(), step).requires_grad_()).square().sum().backward()
        naive_average(naive.parameters(), group)
        same.append(equal(grads(ours.module), grads(naive)))
    return same


@pytest.mark.parametrize("static", [False, True])
def test_checkpoints_on_several_threads_of_the_engine(static) -> None:
    for same in run_ranks(deep_checkpoints, 2, static, backend="host"):
        assert same == [True] * 2


class Manual(nn.Module):
    """Runs backward passes of its own within forward, as manual optimization does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Chain(), Chain()

    def forward(self, x: torch.Tensor, losses: str) -> torch.Tensor:
        for name in losses:
            loss = (self.first if name == "1" else self.second)(x).sum()
            loss.backward()
        return loss.detach()


def within_forward(group, view, losses):
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": True}
    ours, naive = pair(group, Manual, **options)
    same = []
    for step in range(3):
        x = data(group.rank(), step)
        if step == 1:
            with ours.no_sync():
                ours(x, losses)
            naive(x, losses)
            continue
        ours(x, losses)
        for name in losses:
            naive(x, name)
            naive_average(naive.parameters(), group)
        same.append(equal(grads(ours.module), grads(naive)))
        ours.zero_grad()
        naive.zero_grad()
    return same, ours.reducer.passes


@VIEWS
@pytest.mark.parametrize("losses", ["1", "12"])
def test_a_backward_pass_within_forward_is_averaged(view, losses) -> None:
    for same, passes in run_ranks(within_forward, 2, view, losses, backend="host"):
        assert same == [True, True]
        assert passes == 2 * len(losses)


def within_forward_under_join(group):
    ours = DistributedDataParallel(Manual(), process_group=group, find_unused_parameters=True)
    with ours.join():
        for step in range(2 + group.rank()):
            ours.zero_grad()
            ours(data(group.rank(), step), "12")
    return ours.reducer.passes


def test_ranks_that_have_joined_shadow_backward_passes_within_forward() -> None:
    assert run_ranks(within_forward_under_join, 2, backend="host") == [6, 6]


def within_one_forward_only(group):
    ours = DistributedDataParallel(Manual(), process_group=group)
    try:
        ours(data(group.rank()), "1")
    except GradientSyncError as error:
        return str(error)
    return None


def test_a_backward_pass_within_forward_is_checked() -> None:
    for message in run_ranks(within_one_forward_only, 2, backend="host"):
        assert "got no gradient: second." in message


def on_one_rank_within_forward(group):
    ours = DistributedDataParallel(Manual(), process_group=group, find_unused_parameters=True)
    ours.module.second.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ours(data(group.rank()), "12")
    loss = ours.module.first(data(group.rank())).sum()
    loss.backward()  # of no forward: stays on this rank
    return ours.reducer.passes


def test_a_forward_that_raised_has_no_later_pass() -> None:
    assert run_ranks(on_one_rank_within_forward, 2, backend="host") == [1, 1]


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
    ours(data(rank, 1)).sum().backward()
    naive(data(rank, 1)).sum().backward()
    naive_average(naive.parameters(), group)
    return message, equal(grads(ours.module), grads(naive))


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_dist_autograd_is_refused(tmp_path, remote) -> None:
    for message, same in run_ranks(under_dist_autograd, 2, str(tmp_path), remote, backend="host"):
        assert "torch.distributed.autograd.backward() keeps gradients in its context" in message
        assert same
