"""Training on uneven inputs goes wrong: one clear error on all ranks, and nothing hangs."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from harness import RankFailedError, run_ranks
from on_ranks import on_ranks
from torch import nn
from uneven_inputs import Counter, batch, net

from collectives.ddp import (
    DistributedDataParallel,
    GradientSyncError,
    Join,
    JoinError,
    SyncBatchNorm,
    UnevenInputsError,
    convert_sync_batchnorm,
)
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step
from collectives.ddp.hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from collectives.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from collectives.ddp.optim import ZeroRedundancyOptimizer
from collectives.errors import DistNetworkError, GroupAbortedError, QueueEmptyError, UnsupportedOperationError


def caught(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001 - looked at by the caller
        return type(error), str(error), list(getattr(error, "ranks", []))
    return None


@on_ranks(3)
def test_all_ranks_raise_where_one_is_early(group):
    """All ranks raise when rank 1 is through; the group and the model stay usable."""
    ddp = DistributedDataParallel(net(), process_group=group)
    counter = Counter(group)
    seen = []

    def loop(joinable, count=lambda: None):
        with joinable:
            for step in range(2 if group.rank() == 1 else 5):
                seen.append(step)
                count()
                ddp.zero_grad()
                ddp(batch(group, step)).sum().backward()

    errors = [
        caught(functools.partial(loop, ddp.join(throw_on_early_termination=True))),
        caught(functools.partial(loop, Join([counter, ddp], throw_on_early_termination=True), counter)),
    ]
    even = caught(lambda: even_loop(ddp, group))
    rank = group.rank()
    for kind, text, ranks in errors:
        assert kind is UnevenInputsError
        assert ranks == [1]
        assert f"[rank {rank}]" in text
        words = (
            ""
            if rank == 1
            else "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
        )
        assert f": {words}Rank 1 exhausted all inputs, while" in text
    assert seen[:2] == [0, 1]
    assert even is None


def even_loop(ddp, group):
    with ddp.join(throw_on_early_termination=True):
        for step in range(2):
            ddp(batch(group, step)).sum().backward()


class BrokenModel(DistributedDataParallel):
    def join_hook(self, **kwargs):
        if self.process_group.rank() == 1:
            raise KeyError("in a hook of the user's")
        return super().join_hook(**kwargs)


def failing(group, where, kind=KeyError):
    """Rank 1 raises in the user's own code; the others must not wait for it."""
    ddp = DistributedDataParallel(net(), process_group=group)

    def loop():
        with ddp.join():
            for step in range(1 if group.rank() == 0 else 4):
                if where == "before forward" and (group.rank(), step) == (1, 2):
                    raise kind("in the user's code")
                loss = ddp(batch(group, step)).sum()
                if where == "before backward" and (group.rank(), step) == (1, 2):
                    raise kind("in the user's code")
                loss.backward()

    def enter():
        broken = BrokenModel(net(), process_group=group)
        with broken.join():
            broken(batch(group, 0)).sum().backward()

    error = caught(enter if where == "in join_hook" else loop)
    ddp.zero_grad()
    with ddp.join():
        for step in range(group.rank()):
            ddp(batch(group, step)).sum().backward()
    return error


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("before forward", KeyError),
        ("before backward", KeyError),
        ("before forward", UnsupportedOperationError),  # of what the user calls on one rank
        ("before forward", QueueEmptyError),
        ("before backward", DistNetworkError),
        ("in join_hook", KeyError),
    ],
)
def test_an_exception_of_one_rank_is_told_to_the_others(where, kind) -> None:
    errors = run_ranks(failing, 3, where, kind, backend="host", timeout=20)
    assert errors[1][0] is kind
    for rank in (0, 2):
        kind, text, ranks = errors[rank]
        assert kind is JoinError
        assert ranks == [1]
        assert f"[rank {rank}]" in text
        assert "rank 1 left it by an exception" in text


@on_ranks(3, timeout=20)
def test_active_ranks_out_of_step_are_named_on_all_ranks(group):
    """Ranks that have inputs use no_sync differently, or one of them lacks a gradient."""
    ddp = DistributedDataParallel(net(), process_group=group)

    def no_sync():
        with ddp.join():
            for step in range([0, 1, 1][group.rank()]):
                with ddp.no_sync() if group.rank() == 1 else contextlib.nullcontext():
                    ddp(batch(group, step)).sum().backward()

    def missing():
        with ddp.join():
            for step in range([0, 1, 1][group.rank()]):
                if group.rank() == 1:
                    ddp.module[0](batch(group, step)).sum()
                loss = ddp(batch(group, step)).sum()
                (ddp.module[2].weight.sum() + 0 * loss.detach() if group.rank() == 1 else loss).backward()

    no_sync, missing = caught(no_sync), caught(missing)
    assert no_sync[0] is GradientSyncError
    assert "rank 1: its forward sends buffers" not in no_sync[1]
    assert "rank 1: its forward does not send buffers and does not average gradients" in no_sync[1]
    assert "rank 2: its forward does not send buffers and averages gradients" in no_sync[1]
    assert missing[0] is GradientSyncError
    assert "rank 1: 3 of 4 parameters got no gradient" in missing[1]


@on_ranks(2, timeout=20)
def test_wrong_use_is_refused_before_anything_is_sent(group):
    ddp = DistributedDataParallel(net(), process_group=group)
    with_norm = DistributedDataParallel(
        convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), group), process_group=group
    )
    own = Counter(group)
    del own._join_config

    def nested():
        with ddp.join(), ddp.join():
            pass

    def sync_norm(throw):
        with with_norm.join(throw_on_early_termination=throw):
            for step in range(2):
                with_norm(batch(group, step)).sum().backward()

    errors = [
        caught(lambda: Join([])),
        caught(lambda: Join([ddp, ddp])),
        caught(lambda: Join([nn.Linear(1, 1)])),
        caught(lambda: Join.notify_join_context(own)),
        caught(nested),
        caught(lambda: sync_norm(False)),
        caught(lambda: sync_norm(True)),
    ]
    for number in range(3):
        parallel = DistributedDataParallel(net(), process_group=group)
        zero = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.SGD, group, False, True, lr=0.1)
        state, hook = (
            (PostLocalSGDState(group, group, 2), post_localSGD_hook),
            (PostLocalSGDState(group, group, 2), fp16_compress_wrapper(post_localSGD_hook)),
            (group, fp16_compress_wrapper(hook_with_zero_step(allreduce_hook, parallel, zero))),
        )[number]
        parallel.register_comm_hook(state, hook)
        entered = caught(parallel.join(divide_by_initial_world_size=False).__enter__)
        assert entered is not None
        assert entered[0] is ValueError
        assert "leave divide_by_initial_world_size=True" in entered[1]
    with_norm.eval()
    errors.append(caught(lambda: with_norm.join().__enter__()))
    assert isinstance(with_norm.module[1], SyncBatchNorm)
    kinds = [error and error[0] for error in errors]
    assert kinds == [ValueError, ValueError, TypeError, TypeError, RuntimeError, ValueError, None, None]
    assert "at least one" in errors[0][1]
    assert "Linear is no joinable" in errors[2][1]
    assert "throw_on_early_termination=True" in errors[5][1]


def dying(group):
    ddp = DistributedDataParallel(net(), process_group=group)
    with ddp.join():
        for step in range(1 if group.rank() == 0 else 50):
            if (group.rank(), step) == (2, 3):
                import os

                os._exit(7)
            ddp(batch(group, step)).sum().backward()


def test_a_rank_that_dies_ends_the_wait_of_those_that_joined() -> None:
    with pytest.raises(RankFailedError) as raised:
        run_ranks(dying, 3, backend="host", isolated=True, timeout=30)
    assert "PeerLostError" in "".join(raised.value.errors.values())


@on_ranks(2, timeout=60)
def test_an_error_of_another_group_is_told_to_the_others(group):
    ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=group)

    def loop():
        with ddp.join():
            for step in range(2):
                if (group.rank(), step) == (0, 1):
                    raise GroupAbortedError("a group of the user's broke", 0)
                ddp(torch.ones(1, 2)).sum().backward()

    error = caught(loop)
    assert error is not None
    assert error[0] is (GroupAbortedError if group.rank() == 0 else JoinError)
