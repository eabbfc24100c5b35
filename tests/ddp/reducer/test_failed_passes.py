"""Backward passes that fail: exceptions, ranks that die or do not come, ranks out of step."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
from ddp_oracle import Chain, Marked, data, pair, same_pass
from harness import Died, current_store, run_ranks
from on_ranks import on_ranks

from collectives import CollectiveTimeoutError, DistError, GroupAbortedError, PeerLostError
from collectives.ddp import GradientSyncError
from collectives.ddp.hooks.default_hooks import allreduce_hook


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
@on_ranks(2)
def test_an_exception_in_the_users_backward_reaches_the_peers_and_training_goes_on(
    group, culprits, options, hook
):
    reason = "its backward pass was broken off by an exception, which is raised there"
    Marked.log = []
    ours, naive = pair(group, Chain, **options)
    if hook:
        ours.register_comm_hook(group, allreduce_hook)
    for step, words in enumerate((("x", "boom", "x"), ("boom", "x", "x"), ("x", "x", "boom"))):
        mine = words if group.rank() in culprits else ("x", "x", "x")
        with pytest.raises(ValueError if group.rank() in culprits else GradientSyncError) as caught:
            ours(data(group.rank(), step), mine).sum().backward()
        if group.rank() in culprits:
            assert str(caught.value) == "in the user's own backward"
        else:
            assert caught.value.reasons == {1: reason}
        assert same_pass(ours, naive, data(group.rank(), step))
        ours.zero_grad()


class Doing(torch.autograd.Function):
    """Does something when its backward runs."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.act()
        return grad, None


KINDS = pytest.mark.parametrize(
    ("options", "hook"),
    [
        ({}, False),
        ({"gradient_as_bucket_view": True}, True),
        ({"find_unused_parameters": True}, False),
        ({"static_graph": True}, False),
    ],
    ids=str,
)


def acting_within_backward(group, options, hook, act):
    """Runs a good pass, then one of which rank 1 does something between the gradients of two layers."""
    ours, _ = pair(group, Chain, bucket_cap_mb=0, **options)
    if hook:
        ours.register_comm_hook(group, allreduce_hook)
    Marked.log = []
    x = data(group.rank())
    ours(x).sum().backward()
    handle = ours.module.a.register_forward_hook(
        lambda *call: Doing.apply(call[2], act if group.rank() == 1 else lambda: None)
    )
    loss = ours(x).sum()
    handle.remove()
    return loss


def broken_off_between(group):
    """Returns which gradients of the first rank's broken-off pass its peer changes, which runs it later."""

    def boom():
        raise ValueError("between the layers")

    store = current_store()
    ours, naive = pair(group, Chain, bucket_cap_mb=0, gradient_as_bucket_view=True)
    Marked.log = []
    ours(data(group.rank(), 1)).sum().backward()
    ours.zero_grad()
    handle = ours.module.a.register_forward_hook(lambda *call: Doing.apply(call[2], boom))
    loss = ours(data(group.rank())).sum()
    handle.remove()
    if group.rank() == 1:
        store.wait(["broken off on rank 0"])  # until then nothing can have been added to its gradients
    with pytest.raises(ValueError, match="between the layers"):
        loss.backward()
    if group.rank() == 0:
        store.set("broken off on rank 0", "")
    group.allreduce([torch.ones(1)]).wait()  # behind all that the pass has sent
    naive(data(group.rank())).sum().backward()
    found = dict(naive.named_parameters())
    mine = {name: p.grad for name, p in ours.module.named_parameters() if p.grad is not None}
    return len(mine), [name for name, grad in mine.items() if not torch.equal(grad, found[name].grad)]


def test_gradients_of_a_pass_that_was_broken_off_do_not_change_behind_the_callers_back() -> None:
    count, changed = run_ranks(broken_off_between, 2, backend="host")[0]
    assert count >= 2
    assert changed == []


@on_ranks(2)
def test_a_pass_that_was_broken_off_leaves_gradients_alone_that_it_did_not_reach(group):

    def boom():
        raise ValueError("between the layers")

    ours, _ = pair(group, Chain, bucket_cap_mb=0, gradient_as_bucket_view=True)
    Marked.log = []
    ours(data(group.rank())).sum().backward()
    kept = {name: p.grad.clone() for name, p in ours.module.a.named_parameters()}
    handle = ours.module.a.register_forward_hook(lambda *call: Doing.apply(call[2], boom))
    loss = ours(data(group.rank())).sum()
    handle.remove()
    with pytest.raises(ValueError, match="between the layers"):
        loss.backward()
    group.allreduce([torch.ones(1)]).wait()  # behind all that the pass has sent
    changed = [name for name, p in ours.module.a.named_parameters() if not torch.equal(p.grad, kept[name])]
    assert kept
    assert changed == []


def dying(group, options, hook):
    loss = acting_within_backward(group, options, hook, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PeerLostError) as caught:
        loss.backward()
    return caught.value.rank


@pytest.mark.sampled(2)
@KINDS
def test_a_rank_that_is_killed_within_the_pass_is_named_by_that_of_its_peers(options, hook) -> None:
    results = run_ranks(dying, 3, options, hook, backend="host", isolated=True, lost={1}, timeout=40)
    assert isinstance(results[1], Died)
    assert [results[0], results[2]] == [1, 1]


def stalling(group, options, hook):
    store = current_store()
    keys = [f"gave up {rank}" for rank in (0, 2)]
    loss = acting_within_backward(group, options, hook, lambda: store.wait(keys))
    if group.rank() == 1:
        with pytest.raises(DistError):  # comes back to a group that the others gave up
            loss.backward()
        return None
    with pytest.raises((CollectiveTimeoutError, GroupAbortedError), match=r"timeout of 2\.0 s") as caught:
        loss.backward()
    store.set(f"gave up {group.rank()}", "")
    return str(caught.value)


@KINDS
@pytest.mark.sampled(1)
def test_a_rank_that_does_not_come_is_a_time_out_of_the_same_pass(options, hook) -> None:
    results = run_ranks(
        stalling, 3, options, hook, backend="host", isolated=True, group_timeout=timedelta(seconds=2)
    )
    for message in (results[0], results[2]):
        assert "rank 1" in message


@pytest.mark.parametrize("more", [1, 4, 20, 35])
@on_ranks(2)
def test_ranks_out_of_step_learn_it_in_the_same_pass(group, more):
    parallel, _ = pair(group)
    rank = group.rank()
    parallel(data(rank)).sum().backward()
    if rank == 1:
        for _ in range(more):
            with parallel.no_sync():  # a pass that the other rank does not run
                parallel(data(rank)).sum().backward()
    with pytest.raises(GradientSyncError, match="Ranks averaged gradients of different passes") as caught:
        parallel(data(rank)).sum().backward()
    reasons = caught.value.reasons
    assert list(reasons) == [0, 1]
    assert reasons[0].startswith("ran 1 forwards and 0 backward passes under no_sync")
    assert reasons[1].startswith(f"ran {1 + more} forwards and {more} backward passes under no_sync")
