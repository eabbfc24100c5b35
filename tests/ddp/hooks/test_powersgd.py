"""PowerSGD: what the algorithm promises, what it refuses, and its state in checkpoints."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import pickle
import re
import weakref
from unittest import mock

import pytest
import torch
from given_gradients import Given, averaged, gathered, random_gradients, same_on_all_ranks
from harness import run_ranks, run_world
from on_ranks import on_ranks
from torch import nn

import collectives as dist
import collectives.ddp.hooks.powerSGD_hook as powerSGD_hook_module
from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    is_worth_compressing,
    matrix_shape,
    orthogonalize,
    powerSGD_hook,
)
from collectives.ddp.reducer.buckets import Bucket, GradBucket, Gradient
from collectives.errors import DistError

SHAPES = {"a": (12, 20), "bias": (12,), "b": (16, 3, 3, 3), "c": (12, 20), "scale": ()}
MATRICES = ("a", "b", "c")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def state_of(group, **changes):
    return PowerSGDState(group, **{"start_powerSGD_iter": 2, "min_compression_rate": 0.5, **changes})


def wrapped(group, state, hook=powerSGD_hook, shapes=SHAPES, dtype=torch.float32, **options):
    parallel = DistributedDataParallel(Given(shapes, dtype), process_group=group, **options)
    parallel.register_comm_hook(state, hook)
    return parallel


def errors_of(state):
    return {key: error.clone() for key, error in state.error_dict.items()}


def mean_of_inputs(group, name, step, before):
    """Returns the mean of gradients plus errors over the ranks."""
    total = sum(random_gradients(SHAPES, rank, step)[name] for rank in range(group.size()))
    if before:
        total = total + sum(gathered(group, before[name])).view(SHAPES[name])
    return total / group.size()


def check_steps(group, state, hook, compressed, steps=6, **options):
    """Checks each step against the definition; returns whether anything was left out."""
    parallel = wrapped(group, state, hook, **options)
    left_out = 0.0
    for step in range(steps):
        before = errors_of(state)
        found = averaged(parallel, random_gradients(SHAPES, group.rank(), step))
        after = errors_of(state)
        assert state.iter == step + 1
        for name, result in found.items():
            assert same_on_all_ranks(group, result), (name, step)
            mean = mean_of_inputs(group, name, step, before)
            if step < state.start_powerSGD_iter:
                exact = sum(random_gradients(SHAPES, rank, step)[name] for rank in range(group.size()))
                assert torch.equal(result, exact / group.size())
                continue
            if name not in compressed:
                torch.testing.assert_close(result, mean, **CLOSE)
                if after:
                    assert not after[name].any()
                continue
            assert not torch.allclose(result, mean)
            if after:
                mine = random_gradients(SHAPES, group.rank(), step)[name].flatten()
                mine = mine + (before[name] if before else 0)
                torch.testing.assert_close(result.flatten() + after[name], mine, **CLOSE)
                left_out += float(after[name].norm())
    return left_out


def definition(group):
    found = {}
    for number, (hook, compressed, options) in enumerate((
        (powerSGD_hook, MATRICES, {}),
        (powerSGD_hook, MATRICES, {"bucket_cap_mb": 0}),
        (powerSGD_hook, MATRICES, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        (batched_powerSGD_hook, tuple(SHAPES), {}),
    )):  # fmt: skip
        for changes in ({}, {"batch_tensors_with_same_shape": True}, {"orthogonalization_epsilon": 1e-8}):
            state = state_of(group, **changes)
            found[number, str(changes)] = check_steps(group, state, hook, compressed, **options)
    check_steps(group, state_of(group, use_error_feedback=False), powerSGD_hook, MATRICES)
    check_steps(group, state_of(group, warm_start=False), powerSGD_hook, MATRICES)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("backend", "ranks"), [("host", 3), ("gloo", 2), ("round_robin", 2)])
def test_results_and_errors_add_up_to_the_inputs(backend, ranks) -> None:
    for found in run_ranks(definition, ranks, backend=backend):
        assert all(found.values())
        # Which matrices are computed together, and in which buckets, makes no difference.
        assert found[0, "{}"] == pytest.approx(found[0, "{'batch_tensors_with_same_shape': True}"], rel=1e-4)


@on_ranks(2)
def test_matrices_of_the_approximation_s_rank_are_exact(group):
    found = {}
    for rank in (1, 2, 4):
        state = state_of(group, matrix_approximation_rank=rank, use_error_feedback=False)
        parallel = wrapped(group, state, shapes={"m": (30, 40)})
        generator = torch.Generator().manual_seed(rank)
        left = torch.randn(30, rank, generator=generator)
        right = torch.randn(rank, 40, generator=generator)
        for _ in range(4):
            result = averaged(parallel, {"m": left @ right * (group.rank() + 1)})["m"]
        mean = left @ right * (group.size() + 1) / 2
        found[rank] = float((result - mean).norm() / mean.norm())
    assert all(distance < 1e-5 for distance in found.values()), found


@on_ranks(2)
def test_a_bucket_of_the_approximation_s_rank_is_exact(group):
    found = {}
    for rank, numel in (
        (1, 49),
        (2, 49),
        (1, 42),
    ):  # a square of 7 rows, the last one of which may be padding
        shapes = {"vector": (numel - 4,), "more": (2, 2)}
        state = state_of(group, matrix_approximation_rank=rank, use_error_feedback=False)
        parallel = wrapped(group, state, batched_powerSGD_hook, shapes)
        generator = torch.Generator().manual_seed(rank)
        matrix = torch.randn(7, rank, generator=generator) @ torch.randn(rank, 7, generator=generator)
        matrix = matrix.flatten()[:numel]
        for _ in range(4):
            order = [tuple(bucket.indices) for bucket in parallel.reducer.gradients.buckets]
            assert len(order) == 1
            names = list(shapes) if order[0] == (0, 1) else list(shapes)[::-1]
            sizes = [torch.Size(shapes[name]).numel() for name in names]
            given = {
                name: part.view(shapes[name]) * (group.rank() + 1)
                for name, part in zip(names, matrix.split(sizes), strict=True)
            }
            result = averaged(parallel, dict(sorted(given.items())))
            seen = torch.cat([result[name].flatten() for name in names])
        mean = matrix * (group.size() + 1) / 2
        assert state.total_numel_after_compression == 2 * 2 * 7 * rank
        found[rank, numel] = float((seen - mean).norm() / mean.norm())
    assert all(distance < 1e-5 for distance in found.values()), found


@on_ranks(2)
def test_factors_of_buckets_that_are_gone_are_forgotten(group):
    """A state goes on with the same parameters in other buckets, and under the other hook."""
    state = state_of(group)
    found = []
    for hook, cap in ((batched_powerSGD_hook, 25), (batched_powerSGD_hook, 0), (powerSGD_hook, 25)):
        parallel = wrapped(group, state, hook, {"a": (8, 8), "b": (8, 8)}, bucket_cap_mb=cap)
        for step in range(4):
            averaged(parallel, random_gradients({"a": (8, 8), "b": (8, 8)}, group.rank(), step))
        found.append(sorted(map(len, [key.split("; ") for key in state.q_memory_dict])))
    assert found == [[2], [1, 1], [1, 1]]


@on_ranks(2)
def test_settings_may_change_between_steps(group):
    """What was left out before settings changed is sent once by who is not compressed any more."""
    state = state_of(group)
    parallel = wrapped(group, state)
    for step in range(4):
        averaged(parallel, random_gradients(SHAPES, group.rank(), step))
    state.min_compression_rate = 100
    before = errors_of(state)
    assert all(before[name].any() for name in MATRICES)
    for step in (4, 5):
        found = averaged(parallel, random_gradients(SHAPES, group.rank(), step))
        for name, result in found.items():
            torch.testing.assert_close(result, mean_of_inputs(group, name, step, before), **CLOSE)
        before = {}
    assert [bool(error.any()) for error in errors_of(state).values()] == [False] * len(SHAPES)


@on_ranks(2)
def test_a_matrix_of_zeros_recovers(group):
    """A gradient that is zero when compression begins must not stay so for ever."""
    shapes = {"m": (8, 8)}
    found = []
    for epsilon in (0, 1e-8):
        state = state_of(group, orthogonalization_epsilon=epsilon)
        parallel = wrapped(group, state, shapes=shapes)
        for _ in range(4):
            averaged(parallel, {"m": torch.zeros(8, 8)})
        result = averaged(parallel, {"m": torch.ones(8, 8)})["m"]
        found.append(float(result.norm()))
    assert all(norm > 1 for norm in found), found


@pytest.mark.full
@on_ranks(2)
def test_other_data_types_and_memory_formats(group):
    """Checks the residual of complex gradients; returns whether strided ones are equal on all ranks."""
    state = state_of(group)
    parallel = wrapped(group, state, shapes={"z": (6, 9)}, dtype=torch.complex64)
    for step in range(4):
        before = errors_of(state)
        given = random_gradients({"z": (6, 9)}, group.rank(), step, torch.complex64)["z"]
        result = averaged(parallel, {"z": given.conj()})["z"]
    rest = torch.view_as_real(given - result).flatten() + before["z"]
    torch.testing.assert_close(rest, state.error_dict["z"], **CLOSE)
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    state = state_of(group)
    parallel = DistributedDataParallel(conv, process_group=group)
    parallel.register_comm_hook(state, powerSGD_hook)
    for _ in range(4):
        parallel.zero_grad()
        parallel(torch.randn(2, 4, 5, 5)).sum().backward()
    assert same_on_all_ranks(group, conv.weight.grad)


@on_ranks(2)
def test_the_seed_decides_the_first_factors(group):
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(group.rank() + len(results))
        parallel = wrapped(group, state_of(group, random_seed=seed))
        for step in range(3):
            found = averaged(parallel, random_gradients(SHAPES, group.rank(), step))
        results.append(found["a"])
    assert (torch.equal(results[0], results[1]), torch.equal(results[0], results[2])) == (True, False)


class Lost:
    """An average that fails."""

    def __init__(self, group, message) -> None:
        pass

    def wait(self):
        raise DistError("the message is lost")


def memory_is_free(group, fails):
    """Returns whether a pass that breaks off leaves no memory of a bucket to the cyclic garbage collector.

    That is while a message travels, or because it fails.
    """
    state = state_of(group)
    state.iter = 2
    gradient = Gradient(0, "a", nn.Parameter(torch.zeros(12, 20)), set())
    bucket = GradBucket(Bucket(0, [gradient], dtype=torch.float32, device=torch.device("cpu")), last=False)
    memory = weakref.ref(bucket.buffer())
    lost = mock.patch("collectives.ddp.hooks.powerSGD_hook.average", Lost)
    gc.disable()
    try:
        with lost if fails else contextlib.nullcontext():
            future = powerSGD_hook(state, bucket)
            if fails:
                state.flush(1)
                with contextlib.suppress(DistError):
                    future.wait()
        state.pass_failed()
        assert memory() is not None
        del bucket, future
        gradient.leave()
        return memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True], ids=["under way", "failed"])
def test_a_pass_that_breaks_off_leaves_no_memory(fails) -> None:
    assert run_ranks(memory_is_free, 1, fails, backend="host") == [True]


def statistics(group):
    state = state_of(group, min_compression_rate=1.5, compression_stats_logging_frequency=2)
    parallel = wrapped(group, state)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("collectives.ddp.hooks.powerSGD_hook")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for step in range(6):
        averaged(parallel, random_gradients(SHAPES, group.rank(), step))
    logger.removeHandler(handler)
    return state.compression_stats(), messages


def test_statistics_count_the_elements_sent() -> None:
    before = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    after = (12 + 20) * 2 + (16 + 27) + 12 + 1
    for (rate, *numbers), messages in run_ranks(statistics, 1, backend="host"):
        assert numbers == [4 * before, 4 * after]
        assert rate == before / after
        assert "begins to compress after 2 iterations" in messages[0]
        assert [re.search(r"after (\d) iterations", line).group(1) for line in messages[1:]] == ["2", "4"]
        assert f"{before / after:.1f} times fewer elements sent" in messages[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"matrix_approximation_rank": 0},
            ValueError,
            "matrix_approximation_rank must be 1 or more, but is 0",
        ),
        ({"matrix_approximation_rank": 1.5}, TypeError, "must be an integer, but is 1.5 of type float"),
        ({"matrix_approximation_rank": True}, TypeError, "must be an integer, but is True"),
        ({"start_powerSGD_iter": 1}, ValueError, "must be 2 or more with use_error_feedback or warm_start"),
        (
            {"start_powerSGD_iter": -1, "use_error_feedback": False, "warm_start": False},
            ValueError,
            "start_powerSGD_iter must be 0 or more, but is -1",
        ),
        (
            {"min_compression_rate": 0},
            ValueError,
            "min_compression_rate must be positive and finite, but is 0",
        ),
        ({"min_compression_rate": float("nan")}, ValueError, "but is nan"),
        ({"orthogonalization_epsilon": -1e-8}, ValueError, "must be zero or positive, but is -1e-08"),
        ({"random_seed": -1}, ValueError, "random_seed must be 0 to 4294967295, but is -1"),
        ({"compression_stats_logging_frequency": 0}, ValueError, "must be 1 or more, but is 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        PowerSGDState(None, **arguments)


def test_limits_of_torch_hold() -> None:
    assert PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False).iter == 0
    assert PowerSGDState(None, min_compression_rate=0.5).min_compression_rate == 0.5


@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
def test_orthogonal_columns(epsilon) -> None:
    matrices = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = matrices.clone()
    orthogonalize(matrices, epsilon)
    eye = torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    torch.testing.assert_close(matrices.mT @ matrices, eye, rtol=1e-6, atol=1e-6)
    inside = matrices @ (matrices.mT @ before)  # spans the same space
    torch.testing.assert_close(inside, before, rtol=1e-6, atol=1e-6)


def test_what_is_worth_compressing() -> None:
    assert is_worth_compressing((100, 100), 1, 2)
    assert not is_worth_compressing((4, 4), 1, 2)  # (4 + 4) * 2 is not less than 16
    assert is_worth_compressing((4, 4), 1, 1.9)
    assert not is_worth_compressing((1000, 1), 1, 0.1)  # a vector
    assert matrix_shape(torch.empty(6, 4, 3, 3), 216) == (6, 36)
    transposed = torch.empty(5, 7).t()
    assert matrix_shape(transposed, 35) == (5, 7)
    assert matrix_shape(torch.empty(()), 1) == (1, 1)


# ---- checkpoints ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_errors_survive_new_buckets_and_a_checkpoint(group):
    """New buckets come between two steps; errors go with their parameters."""
    state = state_of(group, use_error_feedback=True)
    first = wrapped(group, state)
    for step in range(4):
        averaged(first, random_gradients(SHAPES, group.rank(), step))
    state = pickle.loads(pickle.dumps(state))
    state.process_group = group
    second = wrapped(group, state, bucket_cap_mb=0.0005)
    layouts = []
    for step in range(4, 8):
        before = errors_of(state)
        assert set(before) == set(SHAPES)
        given = random_gradients(SHAPES, group.rank(), step)
        given = dict(sorted(given.items(), key=lambda entry: entry[0], reverse=True))
        result = averaged(second, given)
        layouts.append([bucket.indices for bucket in second.reducer.gradients.buckets])
        for name in MATRICES:
            left = (given[name] - result[name]).flatten() + before[name]
            torch.testing.assert_close(left, state.error_dict[name], **CLOSE)
    assert layouts[0] != layouts[-1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


def train(model, steps, rank, seed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(10 * seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 24, generator=generator)).square().sum().backward()
        optimizer.step()


def demo(rank, size, path):
    """The example of the documentation, then both models go on alike where rank 0's memory is theirs."""
    model = DistributedDataParallel(Model())
    state, hook = PowerSGDState(process_group=None, start_powerSGD_iter=2), powerSGD_hook
    model.register_comm_hook(state, hook)
    train(model, 4, rank, 0)
    checkpoint = {"state_dict": model.state_dict(), "comm_hook": hook, "comm_hook_state": state}
    if rank == 0:
        torch.save(checkpoint, path)
    own = io.BytesIO()
    torch.save(checkpoint, own)
    own.seek(0)
    dist.barrier()
    found = []
    for source in (path, own):
        loaded = torch.load(source, weights_only=False)
        again = DistributedDataParallel(Model())
        again.load_state_dict(loaded["state_dict"])
        again.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
        assert loaded["comm_hook_state"].iter == 4
        assert loaded["comm_hook"] is powerSGD_hook
        train(again, 3, rank, 1)
        found.append([parameter.detach().clone() for parameter in again.parameters()])
    train(model, 3, rank, 1)
    found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def test_the_documented_checkpoint(tmp_path) -> None:
    ranks = run_world(demo, 2, str(tmp_path / "checkpoint.pt"))
    for ours, other in zip(*ranks, strict=True):
        assert all(map(torch.equal, ours, other))
    of_rank_0, own, straight_on = ranks[0]
    for restored, never_saved in zip(own, straight_on, strict=True):
        torch.testing.assert_close(restored, never_saved, **CLOSE)
    assert not all(map(torch.equal, of_rank_0, own))  # the other rank's errors are not in rank 0's file


def saved_by(group):
    state = state_of(group)
    parallel = wrapped(group, state)
    for step in range(3):
        averaged(parallel, random_gradients(SHAPES, group.rank(), step))
    return pickle.dumps(state)


def restored(group, saved, differ):
    """Returns the errors of a pass with a bad state, and of the next one with a mended state."""
    state = pickle.loads(saved)
    state.process_group = group
    if differ:
        state.iter += group.rank()
    parallel = wrapped(group, state)
    parallel.module.a.grad = torch.full((12, 20), 7.0)
    seen = []
    for _ in range(2):
        try:
            parallel(random_gradients(SHAPES, group.rank(), 0)).backward()
        except GradientSyncError as error:
            seen.append(str(error))
            # What was accumulated is there, and the mean is not.
            mine = random_gradients(SHAPES, group.rank(), 0)["a"]
            torch.testing.assert_close(parallel.module.a.grad, mine + 7)
        state.iter = 3
        state.reset_memory()
        parallel.zero_grad()
    return seen


def test_a_state_of_another_world_is_refused_on_all_ranks(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        (saved, _) = run_ranks(saved_by, 2, backend="host")
    for seen in run_ranks(restored, 3, saved, False, backend="host"):
        assert len(seen) == 1
        assert "the state was saved by 2 ranks, but there are 3; call reset_memory()" in seen[0]
        assert "because of ranks 0, 1, 2" in seen[0]
    for seen in run_ranks(restored, 2, saved, True, backend="host"):
        assert len(seen) == 1
        assert "the ranks' states differ" in seen[0]
        assert "iter: 3 on rank 0; 4 on rank 1" in seen[0]


def test_the_process_group_is_not_saved(caplog) -> None:
    state = PowerSGDState(object(), matrix_approximation_rank=3)
    state.rng.randint(5)
    with caplog.at_level(logging.WARNING):
        loaded = pickle.loads(pickle.dumps(state))
    assert "the process group of PowerSGDState cannot be saved" in caplog.text
    assert loaded.process_group is None
    assert loaded.matrix_approximation_rank == 3
    assert loaded.rng.randint(2**31) == state.rng.randint(2**31)


@pytest.mark.parametrize("cap", [25, 0])
@on_ranks(2, timeout=20)
def test_a_state_of_another_model_is_refused(group, cap):
    """Also where it fits all buckets but the last, whose failure must not leave the others waiting."""
    state = state_of(group)
    first = wrapped(group, state)
    for step in range(3):
        averaged(first, random_gradients(SHAPES, group.rank(), step))
    shapes = {**SHAPES, "a": (13, 20)}
    state = pickle.loads(pickle.dumps(state))
    state.process_group = group
    second = wrapped(group, state, shapes=shapes, bucket_cap_mb=cap)
    with pytest.raises(GradientSyncError) as caught:
        averaged(second, random_gradients(shapes, group.rank(), 0))
    message = str(caught.value)
    assert "an error of 240 elements for a, whose gradient has 260" in message


def test_the_first_factors_do_not_depend_on_the_default_device():
    state = PowerSGDState(matrix_approximation_rank=1)
    batch = powerSGD_hook_module._Batch(["w"], [["w"]], [slice(0, 64)], (8, 8), 1)
    flat = torch.ones(64)
    with torch.device("meta"):
        powerSGD_hook_module._first_factors(state, [batch], flat)
    assert batch.q.device.type == "cpu"
