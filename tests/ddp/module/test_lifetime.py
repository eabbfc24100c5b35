"""Copies and pickles of the wrapper, and what is left of it when it is given up."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from ddp_oracle import averages
from on_ranks import on_ranks
from torch import nn

import collectives
from collectives.ddp import DistributedDataParallel, GradientSyncError, MixedPrecision
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step
from collectives.ddp.hooks.default_hooks import allreduce_hook
from collectives.ddp.optim import ZeroRedundancyOptimizer


@on_ranks(2, world=True)
def test_copies_and_pickles_work_or_say_why_not(rank, size):
    world = collectives.GroupMember.WORLD
    ours = DistributedDataParallel(nn.Linear(2, 2), gradient_as_bucket_view=True, find_unused_parameters=True)
    assert averages(ours, world)
    twin = copy.deepcopy(ours)
    assert twin.process_group is world
    assert twin.module.weight is not ours.module.weight
    assert averages(twin, world)
    assert averages(ours, world)
    restored = pickle.loads(pickle.dumps(ours))
    assert restored.gradient_as_bucket_view
    assert restored.find_unused_parameters
    assert averages(restored, world)

    other = collectives.new_group(list(range(size)))
    special = DistributedDataParallel(nn.Linear(2, 2), process_group=other)
    assert averages(copy.deepcopy(special), other)
    with pytest.raises(TypeError, match="not the default group, cannot be pickled; save state_dict"):
        pickle.dumps(special)
    ours.register_comm_hook(world, allreduce_hook)
    with pytest.raises(TypeError, match="communication hook cannot be pickled"):
        pickle.dumps(ours)
    with pytest.raises(TypeError, match=r"deep-copy \.module"):
        copy.deepcopy(ours)


@on_ranks(2)
def test_nothing_outlives_the_wrapper(group):
    """Without the garbage collector, with a loss still around, and the module can be wrapped again."""
    gc.collect()
    gc.disable()
    try:
        module = nn.Linear(2, 2)
        ours = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        loss = ours(torch.ones(1, 2)).sum()
        loss.backward()
        watched = [weakref.ref(ours), weakref.ref(ours.reducer)]
        gradients = weakref.ref(ours.reducer.gradients)
        del ours
        assert all(ref() is None for ref in (*watched, gradients))
        assert not getattr(module.weight, "_post_accumulate_grad_hooks", None)
        module.zero_grad()
        module(torch.full((1, 2), float(group.rank()))).sum().backward()
        assert module.weight.grad.tolist() == [[float(group.rank())] * 2] * 2
        assert averages(DistributedDataParallel(module, process_group=group), group)
    finally:
        gc.enable()


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in the user's own backward")


@on_ranks(2)
def test_nothing_keeps_a_wrapper_or_its_module_however_it_was_used(group):
    """However a wrapper is used, nothing of it and of its module is there afterwards."""

    def use(ours, way):
        for _ in range(3):
            with ours.join() if way == "join" else contextlib.nullcontext():
                if way == "forward fails":
                    with contextlib.suppress(TypeError):
                        ours("no tensor")
                    continue
                out = ours(torch.ones(2, 3))
                if way == "backward fails":
                    with contextlib.suppress(ValueError):
                        Breaking.apply(out).sum().backward()
                elif way != "no backward":
                    out.sum().backward()
            ours.zero_grad()

    gc.collect()
    gc.disable()
    try:
        for way in (
            {"gradient_as_bucket_view": True},
            {"find_unused_parameters": True},
            {"skip_all_reduce_unused_params": True},
            {"static_graph": True},
            {"mixed_precision": MixedPrecision(torch.bfloat16)},
            "hook",
            "join",
            "forward fails",
            "backward fails",
            "no backward",
        ):
            module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
            ours = DistributedDataParallel(
                module, process_group=group, **(way if isinstance(way, dict) else {})
            )
            if way == "hook":
                ours.register_comm_hook(group, allreduce_hook)
            use(ours, way)
            watched = [weakref.ref(thing) for thing in (module, ours, ours.reducer, module[0].weight)]
            del module, ours
            assert [type(ref()).__name__ for ref in watched if ref() is not None] == [], way
    finally:
        gc.enable()


@on_ranks(2, world=True)
def test_nothing_keeps_a_group_of_which_a_hook_failed(rank, size):
    group = collectives.new_group(list(range(size)))
    ours = DistributedDataParallel(nn.Linear(2, 2), process_group=group)

    def failing(state, bucket):
        raise ValueError("in the hook")

    ours.register_comm_hook(group, failing if rank == 1 else allreduce_hook)
    for _ in range(2):
        with pytest.raises(GradientSyncError):
            ours(torch.ones(1, 2)).sum().backward()
    collectives.destroy_process_group(group)
    watched = weakref.ref(group)
    del group, ours, failing
    gc.collect()
    assert watched() is None


@on_ranks(2)
def test_a_hook_may_fail_while_one_rank_keeps_a_model_that_others_gave_up(group):
    kept = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    zero = ZeroRedundancyOptimizer(kept.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1)
    kept.register_comm_hook(group, hook_with_zero_step(allreduce_hook, kept, zero))
    for _ in range(3):
        kept(torch.ones(1, 2)).sum().backward()
    if group.rank() == 1:
        del kept, zero
        gc.collect()
    ours = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    failures = [ValueError("in the hook")]

    def hook(state, bucket):
        if failures and group.rank() == 1:
            raise failures.pop()
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(group, hook)
    with pytest.raises(GradientSyncError, match="in the hook"):
        ours(torch.ones(1, 2)).sum().backward()
    ours.zero_grad()
    assert averages(ours, group)
