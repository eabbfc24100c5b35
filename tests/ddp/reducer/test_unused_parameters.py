"""Parameters that ranks leave out: averaged, left alone, or one error on all ranks in the same pass."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ddp_oracle import Layers, follow, in_place_from, naive_average, same_gradients
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks.default_hooks import allreduce_hook

MODES = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0},
    {"batched_grad_copy": True, "bucket_cap_mb": 0},
    {"in place": True},
]


data = Layers.inputs


def wrapped(group, mode):
    """Returns the layers, wrapped; the mode may ask for all gradients to be reduced in place."""
    options = {name: value for name, value in mode.items() if name != "in place"}
    with in_place_from(0) if mode.get("in place") else contextlib.nullcontext():
        return DistributedDataParallel(Layers(), process_group=group, **options)


def left_out(group, mode, plan, hook):
    """Follows a plan of passes; returns whether each left the averages, and which gradients are missing."""
    ours = wrapped(group, {"find_unused_parameters": True, **mode})
    if hook:
        ours.register_comm_hook(group, allreduce_hook)
    wrong, _ = follow(ours, Layers(), plan)
    return [names == [] for names in wrong], [p.grad is None for p in ours.parameters()]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hook"])
def test_one_rank_skips_a_gradient(mode, hook) -> None:
    """Fig. 3(b) of the paper: without care, the other rank would wait for ever."""
    for equal, missing in run_ranks(left_out, 2, mode, [("0123", "012")], hook, backend="host"):
        assert equal == [True]
        assert missing == [False] * 8


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_all_ranks_left_out_stays_untouched(mode) -> None:
    """Momentum relies on absence: ``None`` stays ``None``, and an older gradient keeps its bits."""
    plan = [("02", "01"), ("0123", "0123"), ("1", "2"), ("12", "02")]
    for equal, missing in run_ranks(left_out, 2, mode, plan[:1], False, backend="host"):
        assert equal == [True]
        assert missing == [False] * 6 + [True] * 2
    for equal, _ in run_ranks(left_out, 3, mode, [(*p, "1") for p in plan], False, backend="host"):
        assert equal == [True] * 4


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "plan",
    [
        [("-01", "-0"), ("-0", "-03"), ("0", "0"), ("0", "02")],
        [("-0123", "-0123"), ("0", "0"), ("0", "01")],  # all that the next one leaves out
    ],
    ids=str,
)
def test_use_adds_up_over_passes_without_synchronisation(mode, plan) -> None:
    for equal, missing in run_ranks(left_out, 2, mode, plan, False, backend="host"):
        assert equal == [True, True]
        assert missing == [False] * 8


@pytest.mark.parametrize("mode", [{}, {"bucket_cap_mb": 0}], ids=str)
@on_ranks(2)
def test_unused_gradients_that_are_views_of_the_buckets_are_restored(group, mode):
    """Gradients that are views of the buckets differ between the ranks where no rank uses them."""
    ours = wrapped(group, {"find_unused_parameters": True, "gradient_as_bucket_view": True, **mode})
    ours(data(group.rank())).sum().backward()
    for parameter in ours.parameters():
        parameter.grad.fill_(group.rank() + 1.0)
    ours(data(group.rank(), 1), "01").sum().backward()
    kept = [p.grad.unique().tolist() for p in ours.module.layers[2:].parameters()]
    assert kept == [[group.rank() + 1.0]] * 4


def nothing_reached(group, find_unused):
    """Rank 1 runs no layer, but its output needs a gradient because its input does."""
    ours = DistributedDataParallel(Layers(), process_group=group, find_unused_parameters=find_unused)
    x = data(group.rank()).requires_grad_()
    ours(x * 1, "0123" if group.rank() == 0 else "").sum().backward()
    return [p.grad for p in ours.parameters()]


def test_a_rank_whose_pass_reaches_no_parameter_takes_part() -> None:
    first, second = run_ranks(nothing_reached, 2, True, backend="host")
    assert all(map(torch.equal, first, second))
    assert all(gradient.abs().sum() > 0 for gradient in first)


def error_of(group, mode, runs, hook=False):
    """Returns the error of a pass, whether the next pass works, and whether gradients are equal after it."""
    ours = wrapped(group, mode)
    if hook:
        ours.register_comm_hook(group, allreduce_hook)
    naive = Layers()
    outcomes = []
    for step in range(2):
        with pytest.raises(GradientSyncError) as caught:
            ours(data(group.rank(), step), runs[group.rank()]).sum().backward()
        outcomes.append((str(caught.value), caught.value.reasons))
        ours.zero_grad()
        ours(data(group.rank(), step)).sum().backward()
        naive.zero_grad()
        naive(data(group.rank(), step)).sum().backward()
        naive_average(naive.parameters(), group)
        # Gloo sums in an order that depends on the size of the message.
        equal = torch.allclose if group.name() == "gloo" else torch.equal
        outcomes.append(same_gradients(ours.module, naive, equal) == [])
        ours.zero_grad()
    return outcomes


@pytest.mark.parametrize("backend_name", ["host", "gloo", "round_robin"])
def test_missing_gradients_raise_on_all_ranks_in_the_same_pass(backend_name) -> None:
    """Named by parameter and rank, without a hang, and both ranks go on afterwards."""
    results = run_ranks(error_of, 3, {}, ("0123", "013", "0"), backend=backend_name)
    reasons = {
        1: "2 of 8 parameters got no gradient: layers.2.weight, layers.2.bias",
        2: "6 of 8 parameters got no gradient: layers.1.weight, layers.1.bias, layers.2.weight, "
        "layers.2.bias, layers.3.weight, layers.3.bias",
    }
    for rank, outcomes in enumerate(results):
        for message, seen in (outcomes[0], outcomes[2]):
            assert seen == reasons
            assert message.startswith(
                f"[rank {rank}] DistributedDataParallel(Layers) over {backend_name} group"
            )
            assert "because of ranks 1, 2" in message
            assert "find_unused_parameters=True" in message
        assert outcomes[1] is outcomes[3] is True


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hook"])
def test_missing_gradients_raise_whatever_the_options(mode, hook) -> None:
    for runs, culprits in ((("012", "0123"), [0]), (("012", "012"), [0, 1])):
        for outcomes in run_ranks(error_of, 2, mode, runs, hook, backend="host"):
            assert list(outcomes[0][1]) == list(outcomes[2][1]) == culprits
            assert outcomes[1] is outcomes[3] is True


@on_ranks(2)
def test_a_rank_whose_pass_reaches_no_parameter_is_named(group):
    with pytest.raises(GradientSyncError) as caught:
        nothing_reached(group, False)
    assert list(caught.value.reasons) == [1]
    assert caught.value.reasons[1].startswith("8 of 8 parameters got no gradient: layers.0.weight")


@on_ranks(2)
def test_long_lists_of_names_are_cut(group):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(1, 1)
            self.parts = nn.ModuleDict({f"part_{i:04}_{'x' * 40}": nn.Linear(1, 1) for i in range(400)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with pytest.raises(GradientSyncError) as caught:
        DistributedDataParallel(Wide(), process_group=group)(torch.ones(1, 1)).sum().backward()
    reasons = caught.value.reasons
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith("800 of 802 parameters got no gradient: parts.part_0000_")
    shown, more = reasons[0].rsplit(", and ", 1)
    assert len(shown) < 5000
    assert int(more.removesuffix(" more")) == 800 - shown.count("parts.")


@on_ranks(2)
def test_a_pass_that_failed_does_not_count_as_use(group):
    """A pass that broke off on one rank does not count as use in the next."""
    ours = DistributedDataParallel(Layers(), process_group=group, find_unused_parameters=True)

    def fail(grad):
        raise ValueError("broken off")

    out = ours(data(group.rank()), "3")
    if group.rank() == 1:
        out.register_hook(fail)
    with ours.no_sync():
        ours(data(group.rank()), "2").sum().backward()
    with pytest.raises((ValueError, GradientSyncError)):
        out.sum().backward()
    ours.zero_grad()
    ours(data(group.rank()), "0").sum().backward()
    assert [p.grad is None for p in ours.parameters()] == [False] * 2 + [True] * 6


def launched_early(group, plan):
    """Returns, for each pass, how many buckets were launched before the gradients of the first layer came."""
    module = Layers()
    events = []
    for parameter in module.layers[0].parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    ours = DistributedDataParallel(module, process_group=group, find_unused_parameters=True, bucket_cap_mb=0)

    def hook(state, bucket):
        events.append("bucket")
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(group, hook)
    found = []
    for step, layers in enumerate(plan):
        events.clear()
        ours(data(group.rank(), step), layers).sum().backward()
        assert events.count("bucket") == 8
        found.append(events.index("first layer"))
    return found


def test_unused_parameters_do_not_keep_others_from_overlapping():
    """The last layer comes first in backward, so that its buckets would keep all others waiting."""
    for found in run_ranks(launched_early, 2, ["012"] * 3 + ["0123"] * 5, backend="host"):
        assert found[:3] == [0, 4, 4]  # the ranks know after the first pass
        assert found[-1] == 6  # of what has come into use for good, too
