"""The quantized all-reduce over every kind of group: its error, its bytes, its arguments."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks, run_world

import collectives as dist
from collectives import ReduceOp
from collectives.core import quantized
from collectives.registry.backends import GroupOptions, create_group
from collectives.store import PrefixStore

FORMATS = (torch.int8, torch.float8_e4m3fn)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def given(rank, size, kind, seed=0):
    """Returns a rank's values, of a kind that is hard to quantize."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(size, generator=generator)
    if kind == "wide":
        values *= torch.randn(size, generator=generator).mul(4).exp()
    elif kind == "zeros" or (kind == "zeros on one rank" and rank == 0):
        values = torch.zeros(size)
    elif kind == "subnormal":
        values *= 1e-42
    elif kind == "huge":
        values[(7 * rank) % max(size, 1) :: 97] = (-1) ** rank * 1e37
    return values


KINDS = ("plain", "wide", "zeros", "zeros on one rank", "subnormal", "huge")


def blocks_of(size, ranks, block):
    """Returns the elements of each block: blocks begin anew with each rank's part."""
    width = -(-size // (16 * ranks)) * 16
    parts = [range(min(size, r * width), min(size, (r + 1) * width)) for r in range(ranks)]
    return [part[i : i + block] for part in parts for i in range(0, len(part), block)]


def bound(values, dtype, block):
    """Returns how far each element of a sum may be off, as docs/guide/numerics.md states it."""
    values = torch.stack(values).double()
    size, ranks = values.shape[1], len(values)
    limits = torch.zeros(size, dtype=torch.float64)
    for elements in blocks_of(size, ranks, block):
        span = slice(elements.start, elements.stop)
        greatest = values[:, span].abs().amax(1).sum()
        if dtype is torch.int8:
            limits[span] = greatest / 125
        else:
            limits[span] = torch.maximum(values[:, span].abs().sum(0) * 0.13, greatest / 2**17)
            limits[span] += greatest / 2**17
    return limits + ranks * 2.0**-140


def errors_are_bounded(group, sizes):
    """Returns the results of many cases as one tensor of bytes, having looked at the error of each."""
    ranks, found = group.size(), []
    cases = [(dtype, kind, size) for dtype in FORMATS for kind in KINDS for size in sizes]
    for seed, (dtype, kind, size) in enumerate(cases):
        block = (1, 16, 100, 256)[seed % 4]
        op = (ReduceOp.SUM, ReduceOp.AVG)[seed % 2]
        everyones = [given(rank, size, kind, seed) for rank in range(ranks)]
        tensor = everyones[group.rank()].clone()
        work = quantized.allreduce(group, tensor, op, dtype=dtype, block=block, async_op=seed % 3 == 0)
        work.wait()
        exact = sum(values.double() for values in everyones)
        limits = bound(everyones, dtype, block)
        if op == ReduceOp.AVG:
            exact, limits = exact / ranks, limits / ranks + 2.0**-140
        error = (tensor.double() - exact).abs()
        assert (error <= limits).all(), (dtype, kind, size, block, op, float((error / limits).max()))
        found.append(tensor.view(torch.uint8))
    return torch.cat(found)


SIZES = (0, 1, 17, 1000)


@pytest.mark.parametrize(("backend", "ranks"), [("host", 3), ("gloo", 2), ("round_robin", 2)])
@pytest.mark.sampled(2)
def test_the_error_is_bounded_and_all_ranks_have_the_same_bits(backend, ranks) -> None:
    found = run_ranks(errors_are_bounded, ranks, SIZES, backend=backend)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.full
def test_more_ranks() -> None:
    found = run_ranks(errors_are_bounded, 8, (0, 3, 255, 300, 4099), backend="host", timeout=100)
    assert all(torch.equal(found[0], other) for other in found)


def special_values(group):
    """Infinity and NaN in single elements, of one rank and of several, beside others in their block."""
    rank, size = group.rank(), 300
    for dtype in FORMATS:
        tensor = given(rank, size, "plain")
        exact = given(0, size, "plain") + given(1, size, "plain")
        if rank == 0:
            tensor[3], tensor[4], tensor[5], tensor[200] = math.inf, -math.inf, math.nan, math.inf
        else:
            tensor[200] = -math.inf
        exact[[3, 4, 5, 200]] = torch.tensor([math.inf, -math.inf, math.nan, math.nan])
        quantized.allreduce(group, tensor, ReduceOp.SUM, dtype=dtype, block=100).wait()
        finite = exact.isfinite()
        assert torch.equal(tensor[~finite].nan_to_num(nan=5.0), exact[~finite].nan_to_num(nan=5.0))
        assert tensor[finite].isfinite().all()
        largest = float(exact[finite].abs().max())
        assert (tensor - exact)[finite].abs().max() <= largest * (0.02 if dtype is torch.int8 else 0.13)
        # A sum that float32 cannot hold is infinite; a mean that it can hold is not.
        for op, expected in ((ReduceOp.SUM, math.inf), (ReduceOp.AVG, 3e38)):
            tensor = torch.full((40,), 3e38)
            quantized.allreduce(group, tensor, op, dtype=dtype).wait()
            torch.testing.assert_close(tensor, torch.full((40,), expected))


def test_special_values_stay_in_their_elements() -> None:
    run_ranks(special_values, 2, backend="host")


def every_dtype_and_layout(rank, size):
    for dtype in DTYPES:
        tensor = given(rank, 600, "plain").to(dtype).view(20, 30)
        other = torch.zeros(40, 30, dtype=dtype)
        other[::2] = tensor
        assert dist.quantized_all_reduce(tensor) is None
        work = dist.quantized_all_reduce(other[::2], async_op=True)
        assert work.wait()
        assert work.result()[0].data_ptr() == other.data_ptr()
        assert torch.equal(other[::2], tensor)
        assert not other[1::2].any()
        exact = sum(given(r, 600, "plain").to(dtype).double() for r in range(size))
        assert (tensor.double().flatten() - exact).abs().max() < 0.1
        means = given(rank, 600, "plain").to(dtype).t()
        dist.quantized_all_reduce(means, dist.ReduceOp.AVG, dtype=torch.float8_e4m3fn, block=64)
        torch.testing.assert_close(means.double(), exact / size, rtol=0.13, atol=0.3)
    leaf = torch.ones(5, requires_grad=True)
    with torch.inference_mode():
        within = torch.ones(5)
        dist.quantized_all_reduce(within)
    dist.quantized_all_reduce(leaf.detach())
    assert torch.equal(leaf.detach(), torch.full((5,), float(size)))
    assert torch.equal(within, leaf.detach())
    outside = dist.new_group([0])
    alone = torch.full((3,), math.pi)
    if rank == 0:
        dist.quantized_all_reduce(alone, group=outside)
        assert torch.equal(alone, torch.full((3,), math.pi))


def test_every_dtype_and_layout() -> None:
    run_world(every_dtype_and_layout, 2, backend="host")


def bytes_sent(group):
    """Returns what a float32 all-reduce as rings do it would send, and what the exchanges sent."""
    size, count = group.size(), 1 << 20
    found = []
    for dtype in FORMATS:
        before = {name: total["bytes"] for name, total in group.stats().items()}
        quantized.allreduce(group, torch.ones(count), ReduceOp.SUM, dtype=dtype).wait()
        stats = {name: total["bytes"] - before.get(name, 0) for name, total in group.stats().items()}
        moved = {name: value for name, value in stats.items() if value}
        # what is counted is the whole of the n parts, of which each rank sends all but its own
        assert set(moved) == {"all_to_all", "all_gather"}, moved
        found.append(sum(moved.values()) * (size - 1) / size)
    return 2 * 4 * count * (size - 1) / size, found


def test_little_more_than_a_quarter_of_the_bytes_is_sent() -> None:
    for plain, sent in run_ranks(bytes_sent, 4, backend="host", timeout=100):
        assert all(0.25 * plain <= each <= 0.27 * plain for each in sent)


def wrong_arguments(group):
    tensor = torch.ones(10)
    for error, message, about in (
        (
            ValueError,
            "dtype must be torch.int8 or torch.float8_e4m3fn, but is torch.float16",
            {"dtype": torch.float16},
        ),
        (TypeError, "block must be an integer, but is 2.0 of type float", {"block": 2.0}),
        (ValueError, "block must be 1 to 1073741824, but is 0", {"block": 0}),
    ):
        with pytest.raises(
            error, match=rf"\[rank {group.rank()}\] quantized_all_reduce on host group.*{message}"
        ):
            quantized.allreduce(group, tensor, ReduceOp.SUM, **about)
    with pytest.raises(dist.UnsupportedOperationError, match="must be SUM or AVG, but is MAX"):
        quantized.allreduce(group, tensor, ReduceOp.MAX)
    for wrong in (
        torch.ones(3, dtype=torch.int32),
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64),
    ):
        with pytest.raises(dist.UnsupportedOperationError, match="the tensor must be strided"):
            quantized.allreduce(group, wrong, ReduceOp.SUM)
    with pytest.raises(TypeError, match="tensor must be a tensor, but is of type list"):
        quantized.allreduce(group, [1.0], ReduceOp.SUM)
    with pytest.raises(ValueError, match="its elements share their memory"):
        quantized.allreduce(group, torch.ones(1).expand(4), ReduceOp.SUM)
    quantized.allreduce(group, tensor, ReduceOp.SUM).wait()
    assert torch.equal(tensor, torch.full((10,), float(group.size())))


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_arguments_are_refused_before_anything_is_sent(ranks) -> None:
    run_ranks(wrong_arguments, ranks, backend="host")


def different(group):
    """Ranks that differ in what decides how long messages are, and in what does not."""
    last = group.rank() == group.size() - 1
    plain = {"dtype": torch.int8, "block": 16}
    for about, op in (
        ({"dtype": torch.float8_e4m3fn, "block": 16}, ReduceOp.SUM),
        ({"dtype": torch.int8, "block": 17}, ReduceOp.SUM),
        (plain, ReduceOp.AVG),
    ):
        tensor = torch.ones(33)
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            quantized.allreduce(
                group, tensor, op if last else ReduceOp.SUM, **(about if last else plain)
            ).wait()
        assert torch.equal(tensor, torch.ones(33))
        assert "quantized_all_reduce" in str(caught.value)
        assert "rank 0: 33 elements in int8, blocks of 16, SUM" in str(caught.value)
    tensor = torch.ones(41 - last)  # of parts with as many elements
    with pytest.raises(dist.CollectiveMismatchError, match="rank 1: 40 elements"):
        quantized.allreduce(group, tensor, ReduceOp.SUM).wait()
    quantized.allreduce(group, tensor[:32], ReduceOp.SUM).wait()
    assert tensor[0] == 2


@pytest.mark.parametrize("backend", ["host", "gloo"])
@pytest.mark.sampled(1)
def test_ranks_that_differ_all_get_an_error_and_go_on(backend) -> None:
    run_ranks(different, 2, backend=backend)


def between_others(group):
    """Results are those of a run alone, whatever else is under way, and whichever thread ends it."""
    expected = given(group.rank(), 5000, "wide")
    quantized.allreduce(group, expected, ReduceOp.SUM, async_op=False).wait()
    for turn in range(6):
        first, second = given(group.rank(), 5000, "wide"), torch.full((9,), float(group.rank()))
        work = quantized.allreduce(group, first, ReduceOp.SUM, async_op=True)
        other = group.allreduce(second)
        works = [work, other] if turn % 2 else [other, work]
        if turn == group.rank():
            work.get_future().wait()
        for one in works:
            one.wait()
        assert second[0] == sum(range(group.size()))
        assert torch.equal(first, expected)


@pytest.mark.parametrize("backend", ["host", "round_robin"])
@pytest.mark.sampled(1)
def test_results_do_not_depend_on_what_is_under_way(backend) -> None:
    run_ranks(between_others, 3, backend=backend)


def a_rank_that_does_not_come(group):
    options = GroupOptions(
        PrefixStore("short", current_store()), group.rank(), group.size(), timeout=timedelta(seconds=1)
    )
    short = create_group("host", options)
    if group.rank() == 0:
        tensor = torch.ones(100)
        with pytest.raises(dist.CollectiveTimeoutError):
            quantized.allreduce(short, tensor, ReduceOp.SUM).wait()
        assert torch.equal(tensor, torch.ones(100))
    group.barrier().wait()


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    run_ranks(a_rank_that_does_not_come, 2, backend="host")
