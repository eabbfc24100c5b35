"""Reductions in two steps, place by place: the bits of one step where places have one source each."""

from __future__ import annotations

import pytest
import torch

from collectives import _native
from collectives.core import native_dtypes

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)
NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]

CASES = [
    pytest.param(dtype, op, id=f"{dtype}-{NAMES[op]}"[6:])
    for dtype, code in native_dtypes.NATIVE_CODES.items()
    for op in range(9)
    if _native.reducible(code, op)
]
EXACT = [case for case in CASES if not (case.values[0].is_floating_point or case.values[0].is_complex)]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def random_bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8).view(torch.bool)
    shape = (count, dtype.itemsize)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype).flatten()


def factor_for(op: int) -> float:
    return 7.0 if op == AVG else 1.0 / 3.0 if op == PREMUL_SUM else 1.0


def in_one(op: int, sources: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(sources[0])
    code = native_dtypes.native_code(out.dtype)
    pointers = [source.data_ptr() for source in sources]
    _native.reduce(out.data_ptr(), pointers, out.numel(), code, op, factor_for(op))
    return out


def in_two(op: int, places: list[list[torch.Tensor]]) -> torch.Tensor:
    out = torch.empty_like(places[0][0])
    code = native_dtypes.native_code(out.dtype)
    count = out.numel()
    partials = []
    for sources in places:
        partial = torch.empty(count * _native.accumulator_bytes(code, op), dtype=torch.uint8)
        pointers = [source.data_ptr() for source in sources]
        _native.accumulate(partial.data_ptr(), pointers, count, code, op, factor_for(op))
        partials.append(partial)
    pointers = [partial.data_ptr() for partial in partials]
    _native.combine(out.data_ptr(), pointers, count, code, op, factor_for(op))
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_places_of_one_source_change_no_bit(dtype: torch.dtype, op: int) -> None:
    for count in (1, 5, 64, 1003):
        sources = [random_bits(dtype, count, seed) for seed in range(4)]
        if dtype.is_complex:  # without NaN, whose part in the sum of components is checked as a component's
            sources = [torch.ones_like(source) * (k + 1) for k, source in enumerate(sources)]
        assert same_bits(in_two(op, [[source] for source in sources]), in_one(op, sources))


@pytest.mark.parametrize(("dtype", "op"), EXACT)
def test_exact_reductions_do_not_depend_on_places(dtype: torch.dtype, op: int) -> None:
    sources = [random_bits(dtype, 1003, seed) for seed in range(6)]
    assert same_bits(in_two(op, [sources[:2], sources[2:5], sources[5:]]), in_one(op, sources))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_add_up_place_by_place(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(1003, generator=generator, dtype=torch.float64).to(dtype) for _ in range(6)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    a, b, c, d, e, f = (source.to(wide) for source in sources)
    expected = (((a + b) + ((c + d) + e)) + f).to(dtype)
    assert same_bits(in_two(SUM, [sources[:2], sources[2:5], sources[5:]]), expected)
    average = ((((a + b) + ((c + d) + e)) + f) / 7).to(dtype)
    assert same_bits(in_two(AVG, [sources[:2], sources[2:5], sources[5:]]), average)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_averages_do_not_overflow_between_the_places(dtype: torch.dtype) -> None:
    """Of seven: a sum of six of the largest does not fit."""
    source = torch.full((37,), torch.finfo(dtype).max, dtype=dtype)
    mean = in_two(AVG, [[source] * 2, [source] * 3, [source]])
    assert torch.allclose(mean.double(), source.double() / 7 * 6, rtol=1e-2)


def test_sums_that_leave_the_type_come_back_exactly() -> None:
    extremes = [torch.tensor([value], dtype=torch.int64) for value in (2**63 - 1, 2**63 - 1, -(2**63), 3)]
    assert in_two(AVG, [extremes[:2], extremes[2:]]).item() == (2**63 + 1) // 7


def test_accumulators_have_the_width_that_the_documentation_says() -> None:
    def width(name: str, op: int) -> int:
        return _native.accumulator_bytes(_native.DTYPES[name], op)

    assert [width(name, SUM) for name in ("float8_e5m2", "bfloat16", "float16", "float32", "float64")] == [
        4,
        4,
        4,
        4,
        8,
    ]
    assert [width("int8", op) for op in (SUM, MAX, AVG)] == [1, 1, 8]
    assert [width("int64", op) for op in (SUM, AVG)] == [8, 16]
    assert [width(name, SUM) for name in ("complex32", "complex64", "complex128")] == [8, 8, 16]
