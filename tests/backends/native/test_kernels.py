"""The reduction kernels against naive formulas of torch: equal bits, whatever the layout and the CPU."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
import sys

import pytest
import torch
from kernel_oracle import (
    AVG,
    BXOR,
    CASES,
    FLOAT8,
    FLOAT_CASES,
    FLOATS,
    MAX,
    MIN,
    OP_NAMES,
    OPS,
    PREMUL_SUM,
    PRODUCT,
    REDUCIBLE,
    SUM,
    assert_same_bits,
    canonical_nan,
    factor_for,
    naive,
    random_bits,
    random_values,
    raw,
    reduce,
)

from collectives import _native
from collectives.core import native_dtypes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


# --- the table of types ---


def test_every_dtype_of_dense_cpu_tensors_has_a_code() -> None:
    named = {d for name in dir(torch) if isinstance(d := getattr(torch, name), torch.dtype)}
    named.discard(getattr(torch, "bcomplex32", None))  # of torch 2.14; docs/guide/limits.md
    assert set(native_dtypes.NATIVE_CODES) == named
    assert sorted(_native.DTYPES.values()) == list(range(len(_native.DTYPES)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", native_dtypes.NATIVE_CODES, ids=str)
def test_counts_and_sizes_cover_the_storage(dtype: torch.dtype) -> None:
    width = native_dtypes.element_bytes(dtype)
    for numel in (0, 1, 7, 8):
        tensor = torch.empty(numel, dtype=dtype)
        assert native_dtypes.native_count(tensor) * width == tensor.untyped_storage().nbytes()
    assert native_dtypes.torch_dtype(native_dtypes.native_code(dtype)) == dtype


@pytest.mark.parametrize("op", range(9), ids=OP_NAMES)
def test_reducible_says_what_reduce_accepts(op: int) -> None:
    for dtype, code in native_dtypes.NATIVE_CODES.items():
        expected = op in OPS.get(dtype, [])
        assert _native.reducible(code, op) is expected, (dtype, OP_NAMES[op])
        if not expected:
            with pytest.raises(ValueError, match=f"{OP_NAMES[op]} of {str(dtype)[6:]} is not defined"):
                _native.reduce(0, [0], 0, code, op, 1.0)


def test_unknown_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="no dtype has the code 200"):
        _native.dtype_size(200)
    with pytest.raises(ValueError, match="no reduction has the code 9"):
        _native.reducible(0, 9)
    with pytest.raises(ValueError, match=r"no dtype of torch .* has the native code 200"):
        native_dtypes.torch_dtype(200)


# --- values ---


@pytest.mark.parametrize(("dtype", "op"), CASES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 17])
def test_reduction_is_the_naive_formula(dtype: torch.dtype, op: int, n: int) -> None:
    factor = factor_for(op, n)
    for make in (random_values, random_bits):
        sources = [make(dtype, 1003, seed=31 * n + k) for k in range(n)]
        expected = naive(op, sources, factor) if n > 1 or op in (AVG, PREMUL_SUM) else sources[0]
        assert_same_bits(reduce(op, sources, factor), expected)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("op", [SUM, AVG, PRODUCT, MIN, MAX], ids=lambda op: OP_NAMES[op])
def test_every_pair_of_float8_codes(dtype: torch.dtype, op: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    pair = [codes.repeat_interleave(256).view(dtype), codes.repeat(256).view(dtype)]
    factor = factor_for(op, 2)
    assert_same_bits(reduce(op, pair, factor), naive(op, pair, factor))


@pytest.mark.parametrize(
    "dtype", [d for d in FLOATS if d.itemsize < 4 and d != torch.float8_e8m0fnu], ids=str
)
def test_rounding_from_float32_is_that_of_torch(dtype: torch.dtype) -> None:
    """One rounding of code * factor: ties, overflow, infinities, subnormals and NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    if dtype.itemsize == 2:
        codes = torch.arange(-32768, 32768, dtype=torch.int16)
    source = codes.view(dtype)
    ties = [1.0 + k / 64 for k in range(64)] + [1.0 + k / 4096 for k in range(1, 64)]
    scales = [math.ldexp(m, e) for m in (1.0, 1.5, -1.25) for e in range(-149, 128, 3)]
    edges = [0.0, -0.0, math.inf, -math.inf, math.nan, 1 + 2**-23, 1 - 2**-24, 3.4e38, 1e-45]
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randint(-(2**31), 2**31, (400 if dtype.itemsize == 1 else 40,), generator=generator)
    drawn = patterns.to(torch.int32).view(torch.float32).tolist()
    for factor in [*ties, *scales, *edges, *drawn]:
        assert_same_bits(reduce(PREMUL_SUM, [source], factor), naive(PREMUL_SUM, [source], factor))


@pytest.mark.parametrize(("dtype", "op"), FLOAT_CASES)
def test_one_nan_in_any_place_gives_the_canonical_nan(dtype: torch.dtype, op: int) -> None:
    n, count = 5, 67
    nan = canonical_nan(dtype)
    for k in range(n):
        sources = [torch.ones(count).to(dtype) for _ in range(n)]
        sources[k][k::n] = nan
        result = reduce(op, sources, factor_for(op, n))
        assert result.to(torch.float64).isnan().nonzero().flatten().tolist() == list(range(k, count, n))
        assert_same_bits(result[k::n].contiguous(), nan.expand(len(range(k, count, n))).contiguous())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_min_and_max_are_those_of_torch(dtype: torch.dtype) -> None:
    a, b = random_bits(dtype, 4099, seed=1), random_bits(dtype, 4099, seed=2)
    wide = [t.to(torch.float64) for t in (a, b)]
    for op, reference in ((MIN, torch.minimum), (MAX, torch.maximum)):
        torch.testing.assert_close(
            reduce(op, [a, b]).to(torch.float64), reference(*wide), rtol=0, atol=0, equal_nan=True
        )


def test_of_equal_zeros_the_first_is_kept() -> None:
    plus, minus = torch.zeros(37), -torch.zeros(37)
    for op in (MIN, MAX):
        assert_same_bits(reduce(op, [plus, minus]), plus)
        assert_same_bits(reduce(op, [minus, plus]), minus)
    assert_same_bits(reduce(SUM, [minus, minus]), minus)


def test_sixteen_bit_sums_round_once() -> None:
    """1 + 256 * 2^-9 is 1.5; rounding after each addition would leave 1."""
    for dtype, steps, tiny in ((torch.bfloat16, 256, 2.0**-9), (torch.float16, 2048, 2.0**-12)):
        sources = [torch.ones(33, dtype=dtype)] + [torch.full((33,), tiny, dtype=dtype)] * steps
        assert_same_bits(reduce(SUM, sources), torch.full((33,), 1.5, dtype=dtype))


def test_average_and_factor_come_before_the_rounding() -> None:
    big = torch.full((19,), 65504.0, dtype=torch.float16)
    assert_same_bits(reduce(AVG, [big, big], 2.0), big)
    assert_same_bits(reduce(PREMUL_SUM, [big, big], 0.5), big)


def test_integer_average_truncates_the_exact_sum() -> None:
    largest = torch.tensor([2**63 - 1, -(2**63), -7, 7], dtype=torch.int64)
    assert reduce(AVG, [largest] * 4, 4.0).tolist() == largest.tolist()
    assert reduce(AVG, [largest] * 3, 2.0).tolist()[2:] == [-10, 10]
    unsigned = torch.tensor([2**64 - 1, 1], dtype=torch.uint64)
    assert reduce(AVG, [unsigned] * 3, 3.0).tolist() == unsigned.tolist()


def test_any_nonzero_byte_is_true() -> None:
    a = torch.arange(256, dtype=torch.uint8)
    b = a.flip(0).contiguous()
    out = torch.empty(256, dtype=torch.uint8)
    for op, expected in ((SUM, (a != 0) | (b != 0)), (MIN, (a != 0) & (b != 0)), (BXOR, (a != 0) ^ (b != 0))):
        _native.reduce(out.data_ptr(), [a.data_ptr(), b.data_ptr()], 256, _native.DTYPES["bool"], op, 1.0)
        assert out.tolist() == expected.to(torch.uint8).tolist()


def test_thousands_of_sources() -> None:
    rows = torch.arange(4096, dtype=torch.int32).repeat(21, 1).T.contiguous()
    assert reduce(SUM, list(rows)).tolist() == [4096 * 4095 // 2] * 21
    floats = [row.to(torch.float32) for row in rows]
    assert_same_bits(reduce(SUM, floats), naive(SUM, floats, 1.0))
    signs = [torch.full((21,), -1, dtype=torch.int8)] * 4096
    assert reduce(AVG, signs, 4096.0).tolist() == [-1] * 21


def test_a_mode_that_flushes_subnormals_changes_nothing() -> None:
    tiny = {d: torch.full((35,), torch.finfo(d).tiny, dtype=d) for d in (torch.float32, torch.float64)}
    expected = {d: t * 0.5 for d, t in tiny.items()}
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        for dtype, source in tiny.items():
            assert_same_bits(reduce(PREMUL_SUM, [source], 0.5), expected[dtype])
            assert_same_bits(reduce(SUM, [expected[dtype]] * 2), source)
            assert (source * 0.5 == 0).all(), "the kernel left the caller's mode changed"
        assert_same_bits(reduce(AVG, [codes], 1.0), codes)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code of upward rounding is that of x86-64")
def test_a_rounding_mode_of_the_caller_changes_nothing() -> None:
    upward = 0x800
    c = ctypes.CDLL(None)
    nearest = c.fegetround()
    one, little = torch.ones(37), torch.full((37,), 2.0**-30)
    assert c.fesetround(upward) == 0
    try:
        result = reduce(SUM, [one, little])
        assert c.fegetround() == upward, "the kernel left the caller's mode changed"
    finally:
        c.fesetround(nearest)
    assert_same_bits(result, one)


def test_what_is_too_large() -> None:
    expected = {
        torch.float8_e4m3fn: 448.0,
        torch.float8_e5m2: math.inf,
        torch.float8_e4m3fnuz: math.nan,
        torch.float8_e5m2fnuz: math.nan,
        torch.float16: math.inf,
        torch.bfloat16: math.inf,
        torch.float32: math.inf,
        torch.float64: math.inf,
    }
    for dtype, value in expected.items():
        big = torch.full((3,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
        doubled = reduce(SUM, [big, big]).to(torch.float64)
        torch.testing.assert_close(doubled, torch.full((3,), value, dtype=torch.float64), equal_nan=True)


def test_scales_round_to_the_nearest_power_of_two() -> None:
    one, half, quarter = (
        torch.tensor([127 - k], dtype=torch.uint8).view(torch.float8_e8m0fnu) for k in range(3)
    )
    for sources, expected in (([one, half], 2.0), ([one, quarter], 1.0), ([one, one], 2.0)):
        assert reduce(SUM, sources).to(torch.float32).item() == expected


# --- layout ---


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_result_depends_on_neither_alignment_nor_split_nor_aliasing(dtype: torch.dtype, op: int) -> None:
    n, count = 3, 533
    code, size, factor = native_dtypes.native_code(dtype), dtype.itemsize, factor_for(op, n)
    sources = [random_bits(dtype, count, seed=k) for k in range(n)]
    expected = raw(reduce(op, sources, factor)).flatten()

    for shift in (0, 1, 3, 8, 13):
        shifted = [torch.zeros(count * size + 64, dtype=torch.uint8) for _ in range(n)]
        for k in range(n):
            shifted[k][shift + k : shift + k + count * size] = raw(sources[k]).flatten()
        places = [buffer.data_ptr() + shift + k for k, buffer in enumerate(shifted)]

        guarded = torch.full((count * size + 64,), 0xA5, dtype=torch.uint8)
        _native.reduce(guarded.data_ptr() + shift, places, count, code, op, factor)
        assert torch.equal(guarded[shift : shift + count * size], expected)
        assert (guarded[:shift] == 0xA5).all()
        assert (guarded[shift + count * size :] == 0xA5).all()

        alias = shift % n
        _native.reduce(places[alias], places, count, code, op, factor)
        assert torch.equal(shifted[alias][shift + alias : shift + alias + count * size], expected)

    for cut in (1, 5, 16, 100, 267):
        out = torch.empty(count * size, dtype=torch.uint8)
        for begin in range(0, count, cut):
            pointers = [s.data_ptr() + begin * size for s in sources]
            _native.reduce(out.data_ptr() + begin * size, pointers, min(cut, count - begin), code, op, factor)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("n", [2, 4, 9, 40])
def test_in_place_on_every_source(n: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64):
        sources = [random_bits(dtype, 10_007, seed=k) for k in range(n)]
        expected = reduce(SUM, sources)
        for k in range(n):
            mine = [s.clone() for s in sources]
            assert_same_bits(reduce(SUM, mine, out=mine[k]), expected)
            assert all(torch.equal(raw(mine[j]), raw(sources[j])) for j in range(n) if j != k)


def test_same_source_several_times() -> None:
    a = torch.arange(1001, dtype=torch.float32)
    assert_same_bits(reduce(SUM, [a, a, a], out=a), torch.arange(1001, dtype=torch.float32) * 3)


def test_nothing_to_do() -> None:
    for dtype in REDUCIBLE:
        for op in OPS[dtype]:
            _native.reduce(0, [0, 0], 0, native_dtypes.native_code(dtype), op, 2.0)
    _native.copy(0, 0, 0)
    _native.copy_streaming(0, 0, 0)


@pytest.mark.parametrize("nbytes", [1, 63, 4095, 4096, 4097, 8192 + 255, 1 << 20, (1 << 20) + 77])
@pytest.mark.parametrize("function", [_native.copy, _native.copy_streaming])
def test_copies(function, nbytes: int) -> None:
    source = random_bits(torch.uint8, nbytes + 128, seed=nbytes)
    for to, start in ((0, 0), (1, 0), (0, 1), (63, 17)):
        target = torch.full((nbytes + 128,), 0xA5, dtype=torch.uint8)
        function(target.data_ptr() + to, source.data_ptr() + start, nbytes)
        assert torch.equal(target[to : to + nbytes], source[start : start + nbytes])
        assert (target[:to] == 0xA5).all()
        assert (target[to + nbytes :] == 0xA5).all()


# --- bad input ---


def test_bad_calls_write_nothing() -> None:
    out = torch.full((4,), 7.0)
    f32, i32 = _native.DTYPES["float32"], _native.DTYPES["int32"]
    pointer = out.data_ptr()
    with pytest.raises(ValueError, match="at least one source, not 0"):
        _native.reduce(pointer, [], 4, f32, SUM, 1.0)
    for factor in (0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="AVG of float32 needs a positive finite number as divisor, not"):
            _native.reduce(pointer, [pointer], 4, f32, AVG, factor)
    for factor in (0.0, 2.5, 2.0**54):
        with pytest.raises(ValueError, match="AVG of int32 needs a positive integer of at most 2"):
            _native.reduce(pointer, [pointer], 4, i32, AVG, factor)
    assert out.tolist() == [7.0] * 4


OVERFLOWING = [
    ([3e38, 3e38], 3e38),
    ([3e38, 3e38, -3e38, 3e38], 1.5e38),
    ([3e38] * 10, 3e38),  # more sources than are read side by side
    ([-3e38] * 3, -3e38),
    ([float("inf"), 1.0], float("inf")),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(("values", "mean"), OVERFLOWING)
def test_an_average_that_can_be_represented_does_not_overflow(
    dtype: torch.dtype, values: list[float], mean: float
) -> None:
    """Neither in whole vectors nor in the rest; what stands beside such an element keeps its bits."""
    larger = 5e269 if dtype is torch.float64 else 1.0
    beside = torch.tensor([1e-45, 1.0, -2e-40, 0.1]).to(dtype)
    count, n = 331, len(values)
    sources = []
    for value in values:
        source = beside.repeat(count)[:count].clone()
        source[::7] = torch.tensor(value * larger, dtype=torch.float64).to(dtype)
        sources.append(source)
    result = reduce(AVG, sources, float(n))
    expected = naive(AVG, [beside.repeat(count)[:count].clone()] * n, float(n))
    mean_at = torch.tensor(mean * larger, dtype=torch.float64).to(dtype)
    assert torch.allclose(result[::7], mean_at.expand_as(result[::7]), rtol=1e-2), result[::7]
    others = torch.ones(count, dtype=torch.bool)
    others[::7] = False
    assert_same_bits(result[others], expected[others])


ENDS_WHILE_A_THREAD_COPIES = """
import threading, time
import torch
from collectives import _native

left, right = torch.ones(1 << 20), torch.ones(1 << 20)

def copy():
    while True:
        _native.copy(left.data_ptr(), right.data_ptr(), left.nbytes)

threading.Thread(target=copy, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.full
@pytest.mark.usefixtures("preloaded_python")
def test_a_process_may_end_while_a_daemon_thread_is_in_a_kernel():
    command = [sys.executable, "-c", ENDS_WHILE_A_THREAD_COPIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
