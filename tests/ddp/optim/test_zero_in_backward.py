"""ZeroRedundancyOptimizer with updates during the backward pass, and what remains equal where they fail."""

from __future__ import annotations

import pytest
import torch
from given_gradients import same_on_all_ranks
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn
from zero_training import bits, equal_states, groups_of, net, same, train

from collectives.ddp import DistributedDataParallel, GradientSyncError, Join
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from collectives.ddp.hooks.default_hooks import allreduce_hook, bf16_compress_wrapper
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from collectives.ddp.optim import ZeroRedundancyOptimizer

SIZES = pytest.mark.parametrize("world_size", [2, 3])


@SIZES
@on_ranks()
def test_updates_during_the_backward_pass_equal_those_after_it(group):
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for shard in (False, True):
            for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
                models = [
                    DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001, **options)
                    for _ in range(2)
                ]
                plain = torch.optim.Adam(groups_of(models[0].module), lr=0.01)
                zero = ZeroRedundancyOptimizer(
                    groups_of(models[1].module), torch.optim.Adam, group, overlap_with_ddp=True, lr=0.01
                )
                hook = make(allreduce_hook, models[1], zero, shard)
                models[1].register_comm_hook(group, hook)
                expected = train(models[0], plain, group, schedule=True)
                got = train(models[1], zero, group, schedule=True)
                grads = [[p.grad for p in m.module.last.parameters()] for m in models]
                zero.consolidate_state_dict()
                good = same(got, expected) and same(*grads)
                if group.rank() == 0:
                    good = good and equal_states(zero.state_dict(), plain.state_dict())
                assert good, (make.__name__, shard, options)
    overlapped_and_uneven(group)


def overlapped_and_uneven(group):
    """The hook of a rank without inputs updates its part of the parameters as well."""
    ddp = DistributedDataParallel(net(), process_group=group)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.01, momentum=0.9
    )
    ddp.register_comm_hook(group, hook_with_zero_step(allreduce_hook, ddp, zero))
    with pytest.raises(ValueError, match="divide_by_initial_world_size"):
        ddp.join(divide_by_initial_world_size=False).__enter__()
    with Join([ddp, zero]):
        train(ddp, zero, group, steps=2 + group.rank())
    assert same_on_all_ranks(group, bits(ddp))


@on_ranks(2, timeout=30)
def test_updates_during_the_backward_pass_beside_low_rank_gradients(group):
    """Trains with hooks around PowerSGD, whose futures wait for the next bucket."""
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for hook in (powerSGD_hook, bf16_compress_wrapper(powerSGD_hook)):
            models = [
                DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.0001) for _ in range(2)
            ]
            plain = torch.optim.Adam(models[0].parameters(), lr=0.01)
            zero = ZeroRedundancyOptimizer(
                models[1].parameters(), torch.optim.Adam, group, overlap_with_ddp=True, lr=0.01
            )
            for model, its in zip(models, (hook, make(hook, models[1], zero)), strict=True):
                state = PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
                model.register_comm_hook(state, its)
            got = train(models[1], zero, group)
            assert same(got, train(models[0], plain, group)), (make.__name__, hook.__name__)
            assert state.total_numel_after_compression


class Breaking(torch.optim.SGD):
    """Fails when it is told to."""

    broken = False

    def step(self, closure=None):
        if Breaking.broken:
            raise ArithmeticError("in the optimizer")
        return super().step(closure)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hook", "OSError: in the hook"),
        ("future", "OSError: in the future"),
        ("optimizer of one rank", "ArithmeticError: in the optimizer"),
    ],
)
@on_ranks(2, timeout=30)
def test_parameters_stay_equal_where_an_update_fails(group, where, words):
    """Checks, for both hooks, the error of the second pass and that the ranks stay equal."""
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.0001)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), Breaking, group, overlap_with_ddp=True, lr=0.1)
        fails = []

        def hook(state, bucket, fails=fails):
            future = allreduce_hook(state, bucket)
            if fails and bucket.index() == 1:
                future.wait()
                if where == "hook":
                    raise OSError("in the hook")
                if where == "future":
                    future = torch.futures.Future()
                    future.set_exception(OSError("in the future"))
            return future

        ddp.register_comm_hook(group, make(hook, ddp, zero))
        before = train(ddp, zero, group, steps=2)[-1]
        if where == "optimizer of one rank":
            Breaking.broken = group.rank() == 1
        else:
            fails.append(True)
        with pytest.raises(GradientSyncError, match=words):
            train(ddp, zero, group, steps=1, first=2)
        Breaking.broken = False
        fails.clear()
        after = bits(ddp)
        assert same_on_all_ranks(group, after)
        # Changed by the buckets that did not fail, as far as the pass came.
        assert where == "hook" or not torch.equal(before, after)
        assert same_on_all_ranks(group, train(ddp, zero, group, steps=1, first=3)[-1])


def failing_step(group):
    """The optimizer of one rank fails in a step; the others do not wait, and training goes on."""
    ddp = DistributedDataParallel(net(), process_group=group)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), Breaking, group, lr=0.1)
    first = train(ddp, zero, group, steps=1)[-1]
    Breaking.broken = group.rank() == 1
    raised = None
    try:
        train(ddp, zero, group, steps=1, first=1)
    except ArithmeticError as error:
        raised = str(error)
    Breaking.broken = False
    second = bits(ddp)
    return raised, [first, second, train(ddp, zero, group, steps=1, first=2)[-1]]


def test_no_rank_waits_for_one_whose_step_failed() -> None:
    ranks = run_ranks(failing_step, 3, backend="host", timeout=30)
    assert [raised for raised, _ in ranks] == [None, "in the optimizer", None]
    for _, states in ranks:
        assert all(map(torch.equal, states, ranks[0][1]))
    first, second, third = ranks[0][1]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def dealt_out_anew(group):
    """Optimizer state must not move; the rank that owns nothing raises with the others."""
    found = []
    for stepped in (True, False):
        weight = nn.Parameter(torch.ones(2))
        zero = ZeroRedundancyOptimizer([weight], torch.optim.Adam, group)
        if stepped:
            weight.grad = torch.ones(2)
            zero.step()
        else:
            plain = torch.optim.Adam([weight])
            zero.load_state_dict(plain.state_dict())
        with pytest.raises(RuntimeError, match="before the first step"):
            zero.assign_together([[weight]])
        found.append(len(zero.state))
    return found


def test_state_is_not_dealt_out_anew_on_any_rank() -> None:
    assert sorted(run_ranks(dealt_out_anew, 2, backend="host")) == [[0, 0], [1, 0]]
