"""A communication hook that fails on one rank, by every hook, over every backend that needs no launcher."""

from __future__ import annotations

from itertools import product

import failing_hooks
import pytest
import torch
import torch.distributed as dist
from ddp_oracle import Chain, Marked, data, pair, same_pass
from failing_hooks import HOOKS, OWN, TORCHS, WHERE
from harness import run_ranks
from on_ranks import on_ranks
from torch_world import run_torch

from collectives.ddp import DistributedDataParallel, GradientSyncError, Join
from collectives.ddp.default_group import resolve_group
from collectives.ddp.hooks.default_hooks import allreduce_hook

OURS = [name for name, (_, hook, _) in HOOKS.items() if hook is not None]
BACKENDS = ["host", "gloo", "round_robin"]
PLACES = ["first", "middle"]
CASES = [
    (name, where, place, backend)
    for number, name in enumerate([*OWN, *OURS])
    for turn, (where, place) in enumerate(product(WHERE, PLACES))
    for backend in (BACKENDS if name in OWN else [BACKENDS[(number + turn) % len(BACKENDS)]])
]
"""Every hook in every way, those of users over every backend, ours over one by turns."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "where", "place", "backend"), CASES)
def test_all_ranks_learn_which_hook_failed_and_train_on(name, where, place, backend) -> None:
    always = place == "first"
    ranks = run_ranks(failing_hooks.failing, 3, name, where, place, always, backend=backend)
    failing_hooks.check(ranks, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["collectives", "collectives_gloo"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", list(TORCHS))
def test_hooks_of_torch_may_fail_as_well(name, where, place, backend) -> None:
    failing_hooks.check(run_torch(in_torchs_world, 3, name, where, place, backend=backend), name)


def in_torchs_world(rank, size, name, where, place):
    make_state, hook = TORCHS[name]
    group = resolve_group(dist.group.WORLD)
    return failing_hooks.failing(
        group, name, where, place, True, lambda _: make_state(dist.group.WORLD), hook
    )


class FailsOnce:
    """Averages, and fails at one of its calls."""

    def __init__(self, group, call):
        self.group, self.call, self.calls = group, call, 0

    def __call__(self, state, bucket):
        self.calls += 1
        if self.calls == self.call:
            raise KeyError("in the hook")
        return allreduce_hook(self.group, bucket)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("backend", ["host", "gloo"])
@on_ranks(2, asked="backend")
def test_a_hook_may_fail_where_inputs_are_uneven(group, culprit):
    """A hook fails where one rank has run out of inputs, perhaps on that one."""
    ours, naive = pair(group, bucket_cap_mb=0)
    ours.register_comm_hook(None, FailsOnce(group, 4 * 3 + 2 if group.rank() == culprit else 0))
    with pytest.raises(GradientSyncError) as caught:
        run_out(ours, 2 + 3 * group.rank())
    assert set(caught.value.reasons) == {culprit}
    assert same_pass(ours, naive, data(group.rank()))


def run_out(ours, passes):
    with Join([ours]):
        for step in range(passes):
            ours(data(ours.process_group.rank(), step)).sum().backward()


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str
)
@pytest.mark.parametrize("backend", ["host", "gloo"])
@on_ranks(3, asked="backend")
def test_a_hook_may_fail_beside_another_ranks_exception(group, options):
    """The user's own backward raises on one rank, and the hook on another one, in the same pass."""
    Marked.log = []
    ours, naive = pair(group, Chain, bucket_cap_mb=0, **options)
    ours.register_comm_hook(None, FailsOnce(group, 2 if group.rank() == 1 else 0))
    kind = ValueError if group.rank() == 0 else GradientSyncError
    with pytest.raises(kind):
        ours(data(group.rank()), ("boom" if group.rank() == 0 else "x", "x", "x")).sum().backward()
    assert same_pass(ours, naive, data(group.rank()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at_fault", [{1}, {0, 2}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("sends", [True, False], ids=["sends", "sends nothing"])
@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(3, asked="backend")
def test_a_hook_may_fail_in_the_last_pass_and_on_several_ranks(group, sends, at_fault):
    """A hook that may send nothing fails on some ranks, and no pass follows; the group is usable still."""
    module = DistributedDataParallel(Chain(), process_group=group, bucket_cap_mb=0)
    fails_now = False

    def hook(state, bucket):
        if fails_now:
            raise KeyError(f"on rank {group.rank()}")
        return OWN["plain"](group, bucket) if sends else failing_hooks.done(bucket.buffer())

    module.register_comm_hook(None, hook)
    module(data(group.rank())).sum().backward()
    loss = module(data(group.rank())).sum()
    fails_now = group.rank() in at_fault
    with pytest.raises(GradientSyncError) as caught:
        loss.backward()
    total = torch.ones(3)
    group.allreduce([total]).wait()
    assert total.tolist() == [3.0] * 3
    assert set(caught.value.reasons) == at_fault
    for rank in at_fault:
        assert f"rank {rank}: its communication hook hook failed on bucket 0" in str(caught.value)
        assert f"KeyError: 'on rank {rank}'" in str(caught.value)
