"""What the reduction kernels must give: types, operations, inputs and naive formulas of torch."""

from __future__ import annotations

import math

import pytest
import torch

from collectives import _native
from collectives.conformance import oracle
from collectives.core import native_dtypes

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)
OP_NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]

FLOAT8 = [*oracle.FLOAT8]
FLOAT16 = [torch.float16, torch.bfloat16]
FLOATS = [*FLOAT8, *FLOAT16, torch.float32, torch.float64]
COMPLEX = [*oracle.COMPLEX]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = [*UNSIGNED, *SIGNED]
REDUCIBLE = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]

# The NaN that results have: torch itself gives a bfloat16 NaN now one code, now another.
CANONICAL_NAN = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.float8_e8m0fnu: 0xFF,
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8000000000000,
}

# Until torch 2.12 a conversion to e4m3fn made NaN of what is too large.
TORCH_SATURATES = not torch.tensor(1e4).to(torch.float8_e4m3fn).to(torch.float32).isnan().item()

FLOAT_OPS = [SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM]
COMPLEX_OPS = [SUM, AVG, PREMUL_SUM]
INTEGER_OPS = [SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR]
OPS = (
    {torch.bool: [SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR]}
    | dict.fromkeys(INTEGERS, INTEGER_OPS)
    | dict.fromkeys(FLOATS, FLOAT_OPS)
    | dict.fromkeys(COMPLEX, COMPLEX_OPS)
    | {torch.float8_e8m0fnu: [SUM, AVG, PRODUCT, MIN, MAX]}
)
CASES = [
    pytest.param(dtype, op, id=f"{dtype}-{OP_NAMES[op]}"[6:]) for dtype in REDUCIBLE for op in OPS[dtype]
]
FLOAT_CASES = [
    pytest.param(dtype, op, id=f"{dtype}-{OP_NAMES[op]}"[6:]) for dtype in FLOATS for op in OPS[dtype]
]


def random_bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Elements of every kind: each bit is drawn, so that NaN, infinities, subnormals and both zeros occur."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8).view(torch.bool)
    return (
        torch.randint(0, 256, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .flatten()
    )


def random_values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Elements of like size, so that sums round instead of being swallowed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATS and dtype != torch.float8_e8m0fnu:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.complex32:
        return torch.randn(2 * count, generator=generator).to(torch.float16).view(dtype)
    if dtype in COMPLEX:
        return torch.randn(count, generator=generator, dtype=dtype)
    return random_bits(dtype, count, seed)


def reduce(
    op: int, sources: list[torch.Tensor], factor: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    first = sources[0]
    out = torch.empty_like(first) if out is None else out
    code = native_dtypes.native_code(first.dtype)
    _native.reduce(out.data_ptr(), [s.data_ptr() for s in sources], first.numel(), code, op, factor)
    return out


def factor_for(op: int, n: int) -> float:
    """A divisor that is not a power of two, and a factor that no binary format holds."""
    return float(n + 1) if op == AVG else 1.0 / 3.0 if op == PREMUL_SUM else 1.0


def naive_float(op: int, sources: list[torch.Tensor], factor: float) -> torch.Tensor:
    dtype = sources[0].dtype
    wide = dtype if dtype == torch.float64 else torch.float32
    scale = torch.tensor(factor, dtype=wide)
    terms = [s.to(wide) * scale if op == PREMUL_SUM else s.to(wide) for s in sources]
    total = terms[0].clone()
    for term in terms[1:]:
        if op in (SUM, AVG, PREMUL_SUM):
            total = total + term
        elif op == PRODUCT:
            total = total * term
        elif op == MIN:
            total = torch.where((term < total) | term.isnan(), term, total)
        else:
            total = torch.where((term > total) | term.isnan(), term, total)
    if op == AVG:
        total = total / scale
        power = 2.0 ** math.ceil(math.log2(factor))
        again = terms[0] / power
        for term in terms[1:]:
            again = again + term / power
        total = torch.where(total.isfinite(), total, again / scale * power)
    nan = total.isnan()
    if dtype == torch.float8_e4m3fn and not TORCH_SATURATES:
        total = total.clamp(-448, 448)
    result = total.to(dtype)
    raw(result)[(nan | result.to(wide).isnan()).flatten()] = raw(canonical_nan(dtype))
    return result


def canonical_nan(dtype: torch.dtype) -> torch.Tensor:
    code = CANONICAL_NAN[dtype].to_bytes(dtype.itemsize, "little")
    return torch.tensor(list(code), dtype=torch.uint8).view(dtype)


def naive_integer(op: int, sources: list[torch.Tensor], factor: float) -> torch.Tensor:
    """Python's integers, then two's complement."""
    dtype = sources[0].dtype
    columns = list(zip(*(s.tolist() for s in sources), strict=True))
    fold = {
        SUM: sum,
        AVG: lambda c: abs(sum(c)) // int(factor) * (1 if sum(c) >= 0 else -1),
        PRODUCT: math.prod,
        MIN: min,
        MAX: max,
        BAND: lambda c: _fold(c, int.__and__),
        BOR: lambda c: _fold(c, int.__or__),
        BXOR: lambda c: _fold(c, int.__xor__),
    }[op]
    bits = 8 * dtype.itemsize
    low = torch.iinfo(dtype).min
    return torch.tensor([(fold(c) - low) % (1 << bits) + low for c in columns], dtype=dtype)


def _fold(column, function):
    result = column[0]
    for value in column[1:]:
        result = function(result, value)
    return result


def naive(op: int, sources: list[torch.Tensor], factor: float) -> torch.Tensor:
    dtype = sources[0].dtype
    if dtype == torch.bool:
        counts = sum(s.to(torch.int64) for s in sources)
        if op in (SUM, MAX, BOR):
            return counts > 0
        return counts == len(sources) if op in (PRODUCT, MIN, BAND) else counts % 2 == 1
    if dtype in INTEGERS:
        return naive_integer(op, sources, factor)
    if dtype in COMPLEX:
        part = oracle.PARTS[dtype]
        return naive_float(op, [s.view(part) for s in sources], factor).view(dtype)
    return naive_float(op, sources, factor)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, 1).view(torch.uint8)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    different = (raw(actual) != raw(expected)).any(dim=1).nonzero().flatten()
    if different.numel():
        i = int(different[0])
        pytest.fail(
            f"{different.numel()} of {actual.numel()} elements differ, first [{i}]: "
            f"{raw(actual)[i].tolist()} instead of {raw(expected)[i].tolist()} (little-endian bytes)"
        )
