"""Hooks by name, every hook on one training loop, and hooks beside other features of the wrapper."""

from __future__ import annotations

import pickle

import hook_zoo
import pytest
import torch
from given_gradients import Given, averaged, random_gradients, same_on_all_ranks
from harness import run_ranks
from on_ranks import on_ranks
from optimizers_in_hooks import every_form
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType as TorchType

import collectives as dist
from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks import BuiltinCommHookType, DDPCommHookType, register_ddp_comm_hook
from collectives.ddp.hooks.compression import OneBitState, one_bit_hook
from collectives.ddp.hooks.default_hooks import allreduce_hook, fp16_compress_hook, fp16_compress_wrapper
from collectives.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

SHAPES = {"m": (6, 8), "bias": (6,)}


def mean(rank_list, step=0):
    given = [random_gradients(SHAPES, rank, step)["m"] for rank in rank_list]
    return sum(given) / len(given)


@on_ranks(2, world=True)
def test_hooks_by_name(rank, size):
    assert {kind.name for kind in DDPCommHookType} == set(TorchType.__members__)
    found = {}
    for kind in DDPCommHookType:
        parallel = DistributedDataParallel(Given(SHAPES))
        register_ddp_comm_hook(kind, parallel)
        result = averaged(parallel, random_gradients(SHAPES, rank, 0))["m"]
        found[kind.name] = float((result - mean(range(size))).norm())
        if "POWER_SGD" in kind.name:
            hook, state = parallel._comm_hooks[0]
            assert hook is (batched_powerSGD_hook if "BATCHED" in kind.name else powerSGD_hook)
            assert state.matrix_approximation_rank == (2 if "RANK2" in kind.name else 1)
    for number in (1, 2, BuiltinCommHookType.FP16_COMPRESS, torch.distributed.BuiltinCommHookType.ALLREDUCE):
        parallel = DistributedDataParallel(Given(SHAPES))
        parallel._register_builtin_comm_hook(number)
        hook, _ = parallel._comm_hooks[0]
        assert hook is (allreduce_hook if int(number) == 1 else fp16_compress_hook)
    parallel = DistributedDataParallel(Given(SHAPES))
    with pytest.raises(TypeError, match="comm_hook_type must be a DDPCommHookType, but is 'ALLREDUCE'"):
        register_ddp_comm_hook("ALLREDUCE", parallel)
    with pytest.raises(ValueError, match="3"):
        parallel._register_builtin_comm_hook(3)
    for name in ("ALLREDUCE", "POWER_SGD", "BATCHED_POWER_SGD_RANK2"):
        assert found[name] == 0
    for name in ("FP16_COMPRESS", "BF16_COMPRESS", "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"):
        assert 0 < found[name] < 0.1
    assert found["NOOP"] > 1


@on_ranks(4, world=True)
def test_post_local_sgd_averages_over_a_part_later(rank, size):
    half, _ = dist.new_subgroups(2)
    for subgroup, again in ((half, True), (half, False)):
        parallel = DistributedDataParallel(Given(SHAPES))
        state = PostLocalSGDState(None, subgroup, start_localSGD_iter=2, post_local_gradient_allreduce=again)
        parallel.register_comm_hook(state, post_localSGD_hook)
        for step in range(4):
            result = averaged(parallel, random_gradients(SHAPES, rank, step))["m"]
            members = range(4) if step < 2 else range(rank // 2 * 2, rank // 2 * 2 + 2) if again else [rank]
            torch.testing.assert_close(result, mean(members, step))
        assert state.iter == 4
    parallel = DistributedDataParallel(Given(SHAPES))
    parallel.register_comm_hook(PostLocalSGDState(None, None, 5), post_localSGD_hook)
    if not torch.cuda.is_available():
        with pytest.raises(GradientSyncError, match="group_size must be given"):
            averaged(parallel, random_gradients(SHAPES, rank, 0))
    loaded = pickle.loads(pickle.dumps(state))
    assert (loaded.iter, loaded.subgroup, loaded.start_localSGD_iter) == (4, None, 2)
    with pytest.raises(ValueError, match="start_localSGD_iter must be 0 or more, but is -1"):
        PostLocalSGDState(None, None, -1)


class Mixed(nn.Module):
    """A sparse embedding, layers that may be left out, and their order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, words, used):
        x = self.embedding(words).sum(0)
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x.sum()


@on_ranks(2)
def test_sparse_gradients_pass_hooks_by_and_unused_layers_do_not_stop_them(group):
    """Trains with sparse gradients and layers that some passes leave out, under stateful hooks."""
    found = []
    for skip in (False, True):
        for make, hook in (
            (lambda: PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook),
            (lambda: OneBitState(group), one_bit_hook),
        ):
            torch.manual_seed(0)
            parallel = DistributedDataParallel(
                Mixed(), process_group=group, find_unused_parameters=True, bucket_cap_mb=0,
                skip_all_reduce_unused_params=skip,
            )  # fmt: skip
            parallel.register_comm_hook(make(), hook)
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            for step in range(6):
                optimizer.zero_grad()
                # Also such that the last buckets, of the first layers, have nothing to do.
                used = [(0, 1, 2), (1, 2), (2,), (0, 2), (2, 1, 0), ()][step]
                parallel(torch.tensor([step, group.rank()]), used).backward()
                assert parallel.module.embedding.weight.grad.is_sparse
                optimizer.step()
            flat = nn.utils.parameters_to_vector(parallel.parameters()).detach()
            found.append(same_on_all_ranks(group, flat))
    assert found == [True] * 4


@on_ranks(2)
def test_a_pass_broken_off_leaves_the_rounds_in_order(group):
    """A pass that an exception ends on one rank, while rounds of PowerSGD overlap; training goes on."""
    state = PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
    shapes = dict.fromkeys("abcd", (6, 8))
    parallel = DistributedDataParallel(Given(shapes), process_group=group, bucket_cap_mb=0)
    parallel.register_comm_hook(state, powerSGD_hook)
    for step in range(3):
        averaged(parallel, random_gradients(shapes, group.rank(), step))

    def fail(gradient):
        if group.rank() == 0 and state.iter == 3:
            raise ArithmeticError("in the model")

    parallel.module.b.register_hook(fail)
    with pytest.raises((ArithmeticError, GradientSyncError)) as caught:
        averaged(parallel, random_gradients(shapes, group.rank(), 3))
    result = averaged(parallel, random_gradients(shapes, group.rank(), 4))["a"]
    assert type(caught.value) is (GradientSyncError if group.rank() else ArithmeticError)
    assert same_on_all_ranks(group, result)
    assert state.iter == 5


def test_a_subgroup_that_is_not_saved_is_told(caplog) -> None:
    loaded = pickle.loads(pickle.dumps(PostLocalSGDState(None, object(), 2)))
    assert loaded.subgroup is None
    assert "the subgroup of PostLocalSGDState cannot be saved; assign subgroup after loading" in caplog.text
    caplog.clear()
    pickle.dumps(PostLocalSGDState(None, None, 2))
    assert not caplog.text


def test_wrapped_hooks_can_be_saved() -> None:
    hook = pickle.loads(pickle.dumps(fp16_compress_wrapper(powerSGD_hook)))
    assert hook.__name__ == "powerSGD_hook_as_float16"


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("backend", "ranks"), [("host", 3), ("gloo", 2), ("round_robin", 3)])
def test_every_hook_trains_with_sparse_gradients_and_uneven_inputs(backend, ranks) -> None:
    hook_zoo.check(run_ranks(hook_zoo.train_with_every_hook, ranks, backend=backend, timeout=100))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_steps_in_hooks_equal_steps_after_backward(backend) -> None:
    """As hooks of torch do that step an optimizer for each bucket."""
    assert run_ranks(every_form, 2, backend=backend) == [[]] * 2
