"""Backward passes of every kind: order of launch, overlap, several forwards, checkpointing, exceptions."""

from __future__ import annotations

import warnings

import pytest
import torch
from ddp_oracle import naive_average, naive_broadcast
from harness import Died, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives import PeerLostError
from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks.default_hooks import allreduce_hook

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


def data(rank, seed=0, rows=2):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(10 * seed + rank))


def grads(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def pair(group, make=None, **options):
    """Returns a module to train with ours and an equal one to train naively."""
    torch.manual_seed(5)
    module = make() if make else nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    torch.manual_seed(5)
    naive = make() if make else nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return DistributedDataParallel(module, process_group=group, **options), naive


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


class Marked(torch.autograd.Function):
    """Notes when its backward runs, or breaks off there."""

    log: list[str]

    @staticmethod
    def forward(ctx, x, word):
        ctx.word = word
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Marked.log.append(ctx.word)
        if ctx.word == "boom":
            raise ValueError("in the user's own backward")
        return grad, None


class Chain(nn.Module):
    """Three layers with marks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(
        self, x: torch.Tensor, words: tuple[str, str, str] = ("after a", "after b", "after c")
    ) -> torch.Tensor:
        for layer, word in zip((self.a, self.b, self.c), words, strict=True):
            x = Marked.apply(layer(x), word)
        return x


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


def broken_off(group, culprits, options, hook):
    """The user's own backward raises on some ranks; returns what each saw and whether the next works."""
    Marked.log = []
    ours, naive = pair(group, Chain, **options)
    if hook:
        ours.register_comm_hook(group, allreduce_hook)
    seen = []
    for step, words in enumerate((("x", "boom", "x"), ("boom", "x", "x"), ("x", "x", "boom"))):
        mine = words if group.rank() in culprits else ("x", "x", "x")
        try:
            ours(data(group.rank(), step), mine).sum().backward()
        except (ValueError, GradientSyncError) as error:
            seen.append(error.reasons if isinstance(error, GradientSyncError) else str(error))
        for model in (ours, naive):
            model.zero_grad()
            model(data(group.rank(), step)).sum().backward()
        naive_average(naive.parameters(), group)
        seen.append(equal(grads(ours.module), grads(naive)))
        ours.zero_grad()
    return seen


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hook"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("culprits", [[1], [0, 1]], ids=["one rank", "all ranks"])
def test_an_exception_in_the_users_backward_reaches_the_peers_and_training_goes_on(
    culprits, options, hook
) -> None:
    reason = "its backward pass was broken off by an exception, which is raised there"
    for rank, seen in enumerate(run_ranks(broken_off, 2, culprits, options, hook, backend="host")):
        assert seen[0::2] == ["in the user's own backward" if rank in culprits else {1: reason}] * 3
        assert seen[1::2] == [True] * 3


def dying(group):
    ours, _ = pair(group, Chain)
    Marked.log = []
    ours(data(group.rank())).sum().backward()
    if group.rank() == 1:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        ours(data(group.rank())).sum().backward()
    return caught.value.rank


def test_a_rank_that_dies_is_named_by_the_pass_of_its_peers() -> None:
    results = run_ranks(dying, 3, backend="host", isolated=True, lost={1}, timeout=30)
    assert isinstance(results[1], Died)
    assert [results[0], results[2]] == [1, 1]


def out_of_step(group):
    parallel, _ = pair(group)
    rank = group.rank()
    parallel(data(rank)).sum().backward()
    if rank == 1:
        with parallel.no_sync():  # a pass that the other rank does not run
            parallel(data(rank)).sum().backward()
    with pytest.raises(GradientSyncError, match="Ranks averaged gradients of different passes"):
        parallel(data(rank)).sum().backward()


def test_ranks_out_of_step_learn_it_in_the_same_pass():
    run_ranks(out_of_step, 2, backend="host")
