"""Hooks that encode gradients: quantization, one bit, the largest elements, adaptive precision."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from given_gradients import Given, averaged, gathered, random_gradients, same_on_all_ranks
from harness import run_ranks
from on_ranks import on_ranks

from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks.compression import (
    LEVELS,
    AdaptiveState,
    Affine,
    LargestElements,
    OneBitState,
    QuantizedAllreduceState,
    Signs,
    TopKState,
    adaptive_hook,
    one_bit_hook,
    quantized_allreduce_hook,
    top_k_hook,
)
from collectives.ddp.hooks.default_hooks import bf16_compress_wrapper
from collectives.ddp.hooks.post_localSGD_hook import PostLocalSGDState
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from collectives.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

SHAPES = {"m": (40, 30), "bias": (7,), "scale": (), "none": (0, 3)}
SIZES = [1, 7, 8, 513, 5000]


def decoded(codec, values):
    found = torch.zeros_like(values)
    codec.add_to(found, codec.encode(values), 1.0)
    return found


def numbers(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [None, 64])
def test_levels_are_within_half_a_step(size, bits, block) -> None:
    values = numbers(size)
    codec = Affine(bits, block)
    for part, found in zip(
        values.split(block or size), decoded(codec, values).split(block or size), strict=True
    ):
        step = (part.max() - part.min()) / (2**bits - 1)
        assert float((part - found).abs().max()) <= float(step) * 0.51 + 1e-6
    blocks = -(-size // (block or size))
    width = min(block or size, size)
    assert codec.encode(values).numel() <= blocks * (8 + width * bits / 8) + 8
    assert torch.equal(decoded(codec, torch.full((size,), 0.3)), torch.full((size,), 0.3))


@pytest.mark.parametrize("size", SIZES)
def test_signs_stand_for_two_means(size) -> None:
    values = numbers(size)
    for part, found in zip(values.split(64), decoded(Signs(64), values).split(64), strict=True):
        for chosen in (part >= 0, part < 0):
            if chosen.any():
                mean = part[chosen].mean()
                torch.testing.assert_close(found[chosen], mean.expand(int(chosen.sum())))
    assert Signs(64).encode(values).numel() <= -(-size // 8) + 8 * -(-size // 64) + 16


def test_small_values_of_one_sign_keep_their_mean_beside_large_ones_of_the_other() -> None:
    for sign in (1, -1):
        values = torch.cat([torch.full((40,), sign * 1e6), torch.full((24,), -sign * 1e-3)])
        assert torch.equal(decoded(Signs(64), values), values)


def test_tensors_of_different_scales_do_not_share_their_means() -> None:
    sizes = [3, 0, 100, 64, 1]
    values = torch.cat([numbers(size) * 10.0**n for n, size in enumerate(sizes)])
    found = decoded(Signs(64, sizes), values).split(sizes)
    for part, its in zip(values.split(sizes), found, strict=True):
        assert torch.equal(its, decoded(Signs(64), part) if part.numel() else part)


@pytest.mark.parametrize("size", [*SIZES, 200_000])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_the_largest_elements_arrive_exactly(size, ratio) -> None:
    values = numbers(size)
    codec = LargestElements(ratio)
    found = decoded(codec, values)
    count = codec.count(size)
    assert int((found != 0).sum()) == count
    kept = found != 0
    assert torch.equal(found[kept], values[kept])
    if count < size:
        assert values[~kept].abs().max() <= values[kept].abs().min()
    equal = torch.ones(size)
    assert int((decoded(codec, equal) != 0).sum()) == count


def low_rank(group):
    """The state after a warm-up, so that the first iteration compresses."""
    state = PowerSGDState(group, 20, start_powerSGD_iter=2, min_compression_rate=0.5)
    state.iter = 2
    return state


def float8(group):
    return QuantizedAllreduceState(group, dtype=torch.float8_e4m3fn, block=100)


HOOKS = {
    "pertensor": (lambda group: group, quantization_pertensor_hook, 0.01),
    "perchannel": (lambda group: group, quantization_perchannel_hook, 0.01),
    "int8": (QuantizedAllreduceState, quantized_allreduce_hook, 0.005),
    "float8": (float8, quantized_allreduce_hook, 0.02),
    "one bit": (lambda group: OneBitState(group, block=64), one_bit_hook, 0.8),
    "top k": (lambda group: TopKState(group, 0.05), top_k_hook, 0.95),
    "adaptive": (lambda group: AdaptiveState(group, interval=2), adaptive_hook, 0.6),
    "low rank": (low_rank, powerSGD_hook, 0.9),
}


def wrapped(group, name, wrapper=None, dtype=torch.float32, **options):
    make, hook, _ = HOOKS[name]
    state = make(group)
    parallel = DistributedDataParallel(Given(SHAPES, dtype), process_group=group, **options)
    parallel.register_comm_hook(state, hook if wrapper is None else wrapper(hook))
    return parallel, state


def each_hook(group):
    """Returns, by hook, the relative distance of the sum of all averages from the truth."""
    found = {}
    for name in HOOKS:
        for options in ({}, {"bucket_cap_mb": 0, "gradient_as_bucket_view": True}):
            parallel, state = wrapped(group, name, **options)
            total, truth, last = torch.zeros(40, 30), torch.zeros(40, 30), 0.0
            for step in range(8):
                before = copy.deepcopy(getattr(state, "error_dict", {}))
                result = averaged(parallel, random_gradients(SHAPES, group.rank(), step))
                assert all(same_on_all_ranks(group, tensor) for tensor in result.values()), name
                given = [random_gradients(SHAPES, rank, step)["m"] for rank in range(group.size())]
                total += result["m"]
                truth += sum(given) / group.size()
                if before:  # what all ranks left out, and what came out, is what went in
                    rest = gathered(group, state.error_dict["m"] - before["m"])
                    kept = result["m"].flatten() + sum(rest) / group.size()
                    mean = (sum(given) / group.size()).flatten()
                    torch.testing.assert_close(kept, mean, rtol=1e-4, atol=1e-5)
                last = float((result["m"] - sum(given) / group.size()).norm() / truth.norm())
            found[name] = last, float((total - truth).norm() / truth.norm())
    return found


@pytest.mark.full
@pytest.mark.parametrize(("backend", "ranks"), [("host", 3), ("gloo", 2), ("round_robin", 2)])
def test_each_hook_averages_in_the_long_run(backend, ranks) -> None:
    for found in run_ranks(each_hook, ranks, backend=backend):
        for name, (last, total) in found.items():
            assert 0 < total < HOOKS[name][2], (name, last, total)


@on_ranks(2)
def test_other_data_types(group):
    found = {}
    for name in HOOKS:
        parallel, _ = wrapped(group, name, bf16_compress_wrapper)
        result = averaged(parallel, random_gradients(SHAPES, group.rank(), 0))
        found[name, "bf16"] = all(t.isfinite().all() and t.dtype is torch.float32 for t in result.values())
        parallel, _ = wrapped(group, name, dtype=torch.complex64)
        given = random_gradients(SHAPES, group.rank(), 0, torch.complex64)
        result = averaged(parallel, {key: value.conj() for key, value in given.items()})
        both = [random_gradients(SHAPES, rank, 0, torch.complex64)["m"] for rank in range(2)]
        distance = (result["m"] - sum(both) / 2).norm() / sum(both).norm()
        found[name, "complex"] = float(distance) < 0.7 and bool(result["m"].imag.any())
    assert all(found.values()), found


@on_ranks(2)
def test_an_overflow_is_passed_on_once(group):
    for name in HOOKS:
        parallel, _ = wrapped(group, name)
        averaged(parallel, random_gradients(SHAPES, group.rank(), 0))
        gradients = random_gradients(SHAPES, group.rank(), 1)
        if group.rank() == 1:
            gradients["m"][2, 3] = torch.nan
        bad = averaged(parallel, gradients)
        good = averaged(parallel, random_gradients(SHAPES, group.rank(), 2))
        assert not bad["m"].isfinite().all(), name
        assert all(t.isfinite().all() for t in good.values()), name


@on_ranks(2)
def test_what_a_message_cannot_hold_leaves_nothing_behind(group):
    """Finite gradients that are infinite in a message of float32, or in a sum on the way to it."""
    found = {}
    for name in HOOKS:
        if "per" in name:  # keep no errors
            continue
        for dtype, large in ((torch.float64, 1e300), (torch.float32, 3e38)):
            parallel, state = wrapped(group, name, dtype=dtype)
            for step in range(4):
                given = random_gradients(SHAPES, group.rank(), step, dtype)
                if step == 2:
                    given["m"][:20], given["m"][20:] = large, -large
                result = averaged(parallel, given)
            finite = [t.isfinite().all() for t in (*result.values(), *state.error_dict.values())]
            found[name, str(dtype)] = bool(torch.stack(finite).all())
    assert len(found) == 12
    assert all(found.values()), found


@on_ranks(2)
def test_a_state_goes_on_in_another_data_type_and_refuses_another_model(group):
    found = {}
    for name in ("int8", "one bit", "top k", "adaptive"):
        parallel, state = wrapped(group, name)
        averaged(parallel, random_gradients(SHAPES, group.rank(), 0))
        wider = DistributedDataParallel(Given(SHAPES, torch.float64), process_group=group)
        hook = HOOKS[name][1]
        wider.register_comm_hook(state, hook)
        before = copy.deepcopy(state.error_dict)
        averaged(wider, random_gradients(SHAPES, group.rank(), 1, torch.float64))
        assert {error.dtype for error in state.error_dict.values()} == {torch.float64}
        assert name == "adaptive" or before["m"].any()  # adaptive has sent all of its first bucket
        other = DistributedDataParallel(Given({**SHAPES, "m": (41, 30)}), process_group=group)
        other.register_comm_hook(state, hook)
        with pytest.raises(GradientSyncError) as caught:
            averaged(other, random_gradients({**SHAPES, "m": (41, 30)}, group.rank(), 0))
        found[name] = str(caught.value)
    for message in found.values():
        assert "an error of 1200 elements for m, whose gradient has 1230" in message


def adapt(group):
    """Returns the level of each of two buckets: one like a normal distribution, one of two values."""
    shapes = {"signs": (64, 64), "normal": (64, 64)}
    found = {}
    for tolerance in (0.001, 0.05, 0.2, 0.7):
        state = AdaptiveState(group, tolerance=tolerance, start_iter=1, interval=3)
        parallel = DistributedDataParallel(Given(shapes), process_group=group, bucket_cap_mb=0)
        parallel.register_comm_hook(state, adaptive_hook)
        for step in range(4):
            given = random_gradients(shapes, group.rank(), step)
            given["signs"] = given["signs"].sign()
            averaged(parallel, given)
            if step == 1:
                assert not state.levels
        state = pickle.loads(pickle.dumps(state))
        found[tolerance] = {keys[0]: level for keys, level in state.levels.items()}
    return found


def test_precision_follows_the_gradients_and_is_agreed() -> None:
    ranks = run_ranks(adapt, 2, backend="host")
    assert ranks[0] == ranks[1]
    levels = {tolerance: found["normal"] for tolerance, found in ranks[0].items()}
    assert levels == {0.001: "32 bits", 0.05: "8 bits", 0.2: "4 bits", 0.7: "1 bit"}
    assert all(found["signs"] == "1 bit" for found in ranks[0].values())
    assert set(levels.values()) <= set(LEVELS)


def level_among_many(group):
    """4 bits would do, and are less of a message, but all of it goes to each other rank."""
    state = AdaptiveState(group, tolerance=0.2)
    parallel = DistributedDataParallel(Given({"m": (64, 64)}), process_group=group)
    parallel.register_comm_hook(state, adaptive_hook)
    for step in range(3):
        averaged(parallel, random_gradients({"m": (64, 64)}, group.rank(), step))
    return list(state.levels.values())


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "level"), [(3, "4 bits"), (5, "8 bits")])
def test_among_many_ranks_messages_that_are_reduced_in_parts_are_cheaper(ranks, level) -> None:
    assert run_ranks(level_among_many, ranks, backend="host") == [[level]] * ranks


@pytest.mark.parametrize(
    ("make", "hook"), [(QuantizedAllreduceState, quantized_allreduce_hook), (OneBitState, one_bit_hook)]
)
@on_ranks(1)
def test_one_rank_alone_rounds_nothing(group, make, hook):
    parallel = DistributedDataParallel(torch.nn.Linear(63, 65), process_group=group)
    parallel.register_comm_hook(make(group), hook)
    inputs = torch.randn(5, 63)
    parallel(inputs).square().sum().backward()
    found = [p.grad.clone() for p in parallel.parameters()]
    parallel.module(inputs).square().sum().backward()
    assert all(torch.equal(2 * one, p.grad) for one, p in zip(found, parallel.parameters(), strict=True))


def only_one_rank_has_outliers(group):
    state = AdaptiveState(group, tolerance=0.7)
    parallel = DistributedDataParallel(Given({"m": (64, 64)}), process_group=group)
    parallel.register_comm_hook(state, adaptive_hook)
    for step in range(2):
        given = random_gradients({"m": (64, 64)}, group.rank(), step)
        if group.rank() == 1:
            given["m"] = given["m"] ** 9
        averaged(parallel, given)
    return list(state.levels.values())


def test_the_rank_with_the_largest_error_counts() -> None:
    ranks = run_ranks(only_one_rank_has_outliers, 2, backend="host")
    assert ranks[0] == ranks[1] != ["1 bit"]


def looks(group, first):
    """Returns the level of each step when the first two gradients are special, far from the next look."""
    state = AdaptiveState(group, tolerance=0.2, interval=50)
    parallel = DistributedDataParallel(Given({"m": (64, 64)}), process_group=group)
    parallel.register_comm_hook(state, adaptive_hook)
    seen = []
    for step in range(5):
        given = random_gradients({"m": (64, 64)}, group.rank(), step)
        if step < 2 and first == "zeros":
            given["m"].zero_()
        elif step < 2 and group.rank() == 1:
            given["m"][0, 0] = torch.inf
        averaged(parallel, given)
        seen.append(next(iter(state.levels.values()), None))
    return seen


def test_looks_at_gradients_that_say_nothing_are_taken_again() -> None:
    assert run_ranks(looks, 2, "zeros", backend="host") == [[None, "1 bit", "1 bit", *["4 bits"] * 2]] * 2
    assert run_ranks(looks, 2, "overflow", backend="host") == [[None, None, None, *["4 bits"] * 2]] * 2


@on_ranks(2)
def test_the_first_iterations_average_exactly(group):
    found = {}
    for make, hook in (
        (lambda: QuantizedAllreduceState(group, start_iter=2), quantized_allreduce_hook),
        (lambda: OneBitState(group, start_iter=2), one_bit_hook),
        (lambda: TopKState(group, start_iter=2), top_k_hook),
        (lambda: AdaptiveState(group, start_iter=2, tolerance=0.7), adaptive_hook),
    ):
        parallel = DistributedDataParallel(Given(SHAPES), process_group=group)
        parallel.register_comm_hook(make(), hook)
        exact = []
        for step in range(4):
            result = averaged(parallel, random_gradients(SHAPES, group.rank(), step))["m"]
            given = [random_gradients(SHAPES, rank, step)["m"] for rank in range(2)]
            exact.append(torch.equal(result, (given[0] + given[1]) / 2))
        found[hook.__name__] = exact
    assert found["one_bit_hook"] == found["top_k_hook"] == [True, True, False, False]
    assert found["quantized_allreduce_hook"] == [True, True, False, False]
    assert found["adaptive_hook"] == [True, True, True, False]


@on_ranks(2)
def test_states_that_differ_are_refused_on_all_ranks(group):
    """A setting that is true is written in two ways, which does not make the states different."""
    rank, number = group.rank(), group.rank() + 1
    dtype = [torch.int8, torch.float8_e4m3fn][rank]
    top_k = TopKState(group, 0.1 * number, rank, use_error_feedback=[True, 1][rank])
    for state, hook, *words in (
        (top_k, top_k_hook, "start_iter: 0 on rank 0; 1 on rank 1", "ratio: 0.1 on rank 0; 0.2 on rank 1"),
        (
            QuantizedAllreduceState(group, dtype=dtype, block=64 * number), quantized_allreduce_hook,
            "dtype: torch.int8 on rank 0; torch.float8_e4m3fn on rank 1",
            "block: 64 on rank 0; 128 on rank 1",
        ),
        (OneBitState(group, block=8 * number), one_bit_hook, "block: 8 on rank 0; 16 on rank 1"),
        (AdaptiveState(group, 0.1 * number), adaptive_hook, "tolerance: 0.1 on rank 0; 0.2 on rank 1"),
        (AdaptiveState(group, interval=number), adaptive_hook, "interval: 1 on rank 0; 2 on rank 1"),
    ):  # fmt: skip
        parallel = DistributedDataParallel(Given(SHAPES), process_group=group)
        parallel.register_comm_hook(state, hook)
        with pytest.raises(GradientSyncError) as caught:
            averaged(parallel, random_gradients(SHAPES, rank, 0))
        reasons = list(caught.value.reasons.values())
        assert len(reasons) == 2
        for reason in reasons:
            assert f"{type(state).__name__} over host group" in reason
            assert all(part in reason for part in words), reason
            assert "use_error_feedback" not in reason


@pytest.mark.parametrize(
    ("make", "hook"),
    [(TopKState, top_k_hook), (AdaptiveState, adaptive_hook), (low_rank, powerSGD_hook)],
    ids=["top k", "adaptive", "PowerSGD"],
)
@on_ranks(2)
def test_a_gradient_of_another_size_than_its_error_is_refused_by_name(group, make, hook):
    """A parameter gets another size on one rank."""
    parallel = DistributedDataParallel(Given(SHAPES), process_group=group)
    parallel.register_comm_hook(make(group), hook)
    given = random_gradients(SHAPES, group.rank(), 0)
    for _ in range(3):
        averaged(parallel, given)
    if group.rank() == 1:
        parallel.module.bias.data = torch.zeros(5, 7)
    with pytest.raises(GradientSyncError) as caught:
        averaged(parallel, given)
    reasons = caught.value.reasons
    assert reasons.keys() == {1}
    assert "the gradient of bias could not be put into its bucket" in reasons[1]
    assert "bias (float32[5, 7] instead of float32[7])" in reasons[1]
    assert "another model" not in reasons[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKState(None, 0), "ratio must be above 0 and at most 1, but is 0"),
        (lambda: TopKState(None, 1.5), "but is 1.5"),
        (lambda: OneBitState(None, block=12), "block must be a positive multiple of 8, but is 12"),
        (lambda: OneBitState(None, -1), "start_iter must be 0 or more, but is -1"),
        (lambda: QuantizedAllreduceState(None, block=0), "block must be 1 to 1073741824, but is 0"),
        (lambda: QuantizedAllreduceState(None, dtype=torch.uint8), "torch.float8_e4m3fn, but is torch.uint8"),
        (lambda: AdaptiveState(None, tolerance=0), "tolerance must be above 0, but is 0"),
        (lambda: AdaptiveState(None, interval=0), "interval must be 1 or more, but is 0"),
        (
            lambda: quantization_perchannel_hook(None, None, bucket_size=0),
            "bucket_size must be 1 or more, but is 0",
        ),
    ],
)
def test_settings_out_of_range_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopKState(None, 0.1, np.int64(1)),
        lambda: AdaptiveState(None, interval=2.5),
        lambda: PostLocalSGDState(None, None, True),
        lambda: OneBitState(None, block=64.0),
        lambda: QuantizedAllreduceState(None, block=64.0),
        lambda: QuantizedAllreduceState(None, 1.0),
    ],
)
def test_settings_that_are_no_integers_are_refused(make) -> None:
    with pytest.raises(TypeError, match="must be an integer, but is"):
        make()


@on_ranks(2)
def test_levels_of_buckets_that_are_gone_are_forgotten(group):
    """A state goes on with the same parameters in other buckets."""
    shapes = dict.fromkeys("abcd", (16, 16))
    state = AdaptiveState(group)
    for cap in (25, 0):
        parallel = DistributedDataParallel(Given(shapes), process_group=group, bucket_cap_mb=cap)
        parallel.register_comm_hook(state, adaptive_hook)
        for step in range(3):
            averaged(parallel, random_gradients(shapes, group.rank(), step))
    assert sorted(name for keys in state.levels for name in keys) == list("abcd")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@on_ranks(3)
def test_what_a_quantized_all_reduce_leaves_out_survives_new_buckets_and_checkpoints(group, dtype):
    """What came out, and the errors that went through new buckets and checkpoints, are what went in."""
    shapes = {name: (n, 40) for n, name in enumerate("abcdefgh", 1)}
    state = QuantizedAllreduceState(group, dtype=dtype, block=64)
    total, truth = ({name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for turn, cap in enumerate((25, 0, 0.001)):
        parallel = DistributedDataParallel(Given(shapes), process_group=group, bucket_cap_mb=cap)
        parallel.register_comm_hook(state, quantized_allreduce_hook)
        for step in range(3):
            everyones = [random_gradients(shapes, rank, 10 * turn + step) for rank in range(group.size())]
            result = averaged(parallel, everyones[group.rank()])
            assert all(same_on_all_ranks(group, tensor) for tensor in result.values())
            for name in shapes:
                total[name] += result[name]
                truth[name] += sum(given[name] for given in everyones) / group.size()
        state = pickle.loads(pickle.dumps(state))
        state.process_group = group
    left = state.error_dict
    assert left.keys() == shapes.keys()
    for name, shape in shapes.items():
        error = left[name].view(shape).clone()
        group.allreduce(error).wait()
        assert error.any()
        torch.testing.assert_close(total[name] + error / group.size(), truth[name], rtol=1e-4, atol=1e-5)


def test_the_largest_elements_hold_what_is_not_a_number() -> None:
    """Also where the threshold is guessed from a sample, in which it is not."""
    values = numbers(200_000)
    values[12345] = torch.nan
    found = decoded(LargestElements(0.01), values)
    assert found[12345].isnan()
    assert int(found.isnan().sum()) == 1
