"""Delayed gradients: one message of their own in every pass, beside hooks, no_sync and the unused check."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ddp_oracle import Launches, Layers, naive_average, same_gradients, same_pass
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives import UnsupportedOperationError
from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks.default_hooks import allreduce_hook

data = Layers.inputs

DELAYED = ["layers.3.weight", "layers.3.bias", "layers.2.bias"]


def delaying(module, group, trigger, **options):
    """Returns the wrapped module, and the names that its communication hook has seen."""
    parameters = dict(module.named_parameters())
    hooked = trigger if isinstance(trigger, nn.Parameter) else parameters[trigger]
    seen = []
    names = DELAYED[:: 1 - 2 * (group.rank() % 2)]  # in whatever order a rank names them
    ours = DistributedDataParallel(
        module,
        process_group=group,
        delay_all_reduce_named_params=[(name, parameters[name]) for name in names],
        param_to_hook_all_reduce=hooked,
        **options,
    )

    def hook(state, bucket):
        seen.extend(bucket.names())
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(group, hook)
    return ours, seen


def delayed(group, trigger, options):
    module, naive = Layers(), Layers()
    foreign = nn.Parameter(torch.ones(1))
    ours, seen = delaying(module, group, foreign if trigger == "foreign" else trigger, **options)
    sent = Launches(group)
    for step in range(2):
        seen.clear()
        sent.sizes.clear()
        for model in (ours, naive):
            model.zero_grad()
        (ours(data(group.rank(), step) * foreign).sum()).backward()
        sizes = list(sent.sizes)
        naive(data(group.rank(), step) * foreign.detach()).sum().backward()
        naive_average(naive.parameters(), group)
        assert same_gradients(ours.module, naive) == []
    return seen, sizes


@pytest.mark.parametrize("trigger", ["layers.1.weight", "layers.3.bias", "foreign"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_delayed_gradients_are_one_message_that_no_hook_sees(trigger, options) -> None:
    for seen, sizes in run_ranks(delayed, 2, trigger, {**options, "bucket_cap_mb": 0}, backend="host"):
        assert sorted(seen) == sorted(name for name, _ in Layers().named_parameters() if name not in DELAYED)
        assert sizes.count(9 + 3 + 3) == 1
        assert sizes[-2] == 9 + 3 + 3  # after the last bucket, before the signals


@on_ranks(2)
def test_delayed_gradients_are_averaged_under_no_sync(group):
    module, naive = Layers(), Layers()
    ours, _ = delaying(module, group, "layers.0.weight")
    parameters = dict(naive.named_parameters())
    for step in range(3):
        with ours.no_sync() if step < 2 else contextlib.nullcontext():
            ours(data(group.rank(), step)).sum().backward()
        naive(data(group.rank(), step)).sum().backward()
        naive_average(naive.parameters() if step == 2 else [parameters[n] for n in DELAYED], group)
        assert same_gradients(ours.module, naive) == []


@on_ranks(2)
def test_delayed_gradients_leave_as_soon_as_their_trigger_has_its_own(group):
    module = Layers()
    ours, _ = delaying(module, group, "layers.1.weight")
    sent = Launches(group)
    before = []
    for layer in (2, 0):  # the engine comes from layer 3
        module.layers[layer].weight.register_hook(lambda grad: before.append(len(sent.sizes)))
    with ours.no_sync():
        ours(data(group.rank())).sum().backward()
    assert (before, sent.sizes) == ([0, 1], [15])


@on_ranks(2)
def test_delayed_gradients_that_do_not_come_are_zeros_and_no_error(group):
    module = Layers()
    ours, _ = delaying(module, group, "layers.0.weight")
    half = Layers()
    run = "0123" if group.rank() else "012"  # no layer 3, whose parameters are delayed, on rank 0
    ours(data(group.rank()), run).sum().backward()
    half(data(group.rank()), run).sum().backward()
    naive_average(half.parameters(), group)
    assert same_gradients(module, half) == []


class Twice(nn.Module):
    """A layer run twice within checkpoints, whose gradient comes in two nested tasks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


@on_ranks(2)
def test_delayed_gradients_that_come_twice_are_averaged_whole(group):
    module, naive = Twice(), Twice()
    weight = module.shared.weight
    ours = DistributedDataParallel(
        module,
        process_group=group,
        static_graph=True,
        delay_all_reduce_named_params=[("shared.weight", weight), ("shared.bias", module.shared.bias)],
        param_to_hook_all_reduce=weight,
    )
    assert all(same_pass(ours, naive, data(group.rank(), step)) for step in range(3))


def delayed_error(group):
    module = Layers()
    ours, _ = delaying(module, group, "layers.0.weight")
    output = ours(data(group.rank()))
    if group.rank() == 1:
        module.layers[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises((GradientSyncError, ZeroDivisionError)) as caught:
        output.sum().backward()
    again = torch.ones(1)
    group.allreduce([again]).wait()
    return type(caught.value).__name__, float(again)


def test_an_exception_within_backward_leaves_nobody_waiting_for_delayed_gradients() -> None:
    first, second = run_ranks(delayed_error, 2, backend="host")
    assert (first, second) == (("GradientSyncError", 2.0), ("ZeroDivisionError", 2.0))


@on_ranks(1)
def test_delayed_gradients_are_refused_under_join(group):
    ours, _ = delaying(Layers(), group, "layers.0.weight")
    with pytest.raises(UnsupportedOperationError, match="delay_all_reduce_named_params"), ours.join():
        pass


@on_ranks(2)
def test_all_parameters_may_be_delayed(group):
    module, naive = Layers(), Layers()
    named = list(module.named_parameters())
    ours = DistributedDataParallel(
        module,
        process_group=group,
        delay_all_reduce_named_params=named,
        param_to_hook_all_reduce=named[0][1],
    )
    sent = Launches(group)
    ours(data(group.rank())).sum().backward()
    assert len(sent.sizes) == 2  # the gradients, and what ranks tell each other of the pass
    assert same_pass(ours, naive, data(group.rank()))


@on_ranks(1)
def test_delays_that_make_no_sense_are_named(group):
    module = Layers()
    weight = module.layers[0].weight
    for delayed, trigger, words in (
        (None, weight, "only the second is given"),
        ([("layers.0.weight", weight)], None, "only the first is given"),
        ([("x", nn.Parameter(weight.data))], weight, "has 'x', which is no parameter"),
        ([], torch.ones(1), "must be a parameter, but is of type Tensor"),
    ):
        arguments = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": trigger}
        with pytest.raises((ValueError, TypeError), match=words):
            DistributedDataParallel(module, process_group=group, **arguments)
