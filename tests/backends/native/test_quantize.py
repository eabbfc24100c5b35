"""The quantizing kernels against the formula in numpy, element by element: equal bits, on every CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantize_oracle import (
    FORMATS,
    KINDS,
    SIZES,
    code_values,
    decoded_by_core,
    quantized_by_core,
    random_values,
)

from collectives import _native
from collectives.core import quantized
from collectives.core.native_dtypes import NATIVE_CODES


def greatest_code(dtype, finite):
    return np.float32({torch.int8: (126, 127), torch.float8_e4m3fn: (416, 448)}[dtype][finite])


def check_block(values, codes, step, rest, dtype):
    """Checks one block against what the header of the kernels says."""
    finite = np.isfinite(values)
    most = np.abs(values[finite], dtype=np.float32).max(initial=np.float32(0))
    greatest = greatest_code(dtype, bool(finite.all()))
    assert np.signbit(step) == (not finite.all())
    step = np.abs(step)
    # the quotient, one step of float32 up where its product is too small, and down where it is infinite
    with np.errstate(over="ignore"):
        candidates = [most / greatest]
        candidates += [
            np.nextafter(candidates[0], np.float32(np.inf)),
            np.nextafter(candidates[0], np.float32(0)),
        ]
        assert step in candidates
        product = step * greatest
        assert np.isfinite(product)
        assert product >= most or np.nextafter(step, np.float32(np.inf)) * greatest == np.inf
    assert most == 0 or step > 0
    table = code_values(dtype)
    numbers = table[codes]
    usable = np.unique(table[np.abs(table) <= greatest])
    exact = values[finite].astype(np.float64)
    quotients = (values[finite] / (step if step > 0 else np.float32(1))).astype(np.float64)
    nearest = np.abs(usable[None, :] - quotients[:, None]).min(axis=1)
    assert (np.abs(numbers[finite] - quotients) <= nearest).all()
    error = np.abs(exact - numbers[finite] * np.float64(step))
    half = np.float64(step) / 2 * (1 + 2**-14)
    if dtype is torch.int8:
        assert (error <= half).all()
    else:
        assert (error <= np.maximum(np.abs(exact) / 16, half * 2**-9) * (1 + 2**-18)).all()
    product = numbers[finite].astype(np.float32) * step
    assert np.array_equal(rest[finite], values[finite] - product)
    assert np.isnan(rest[~finite]).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_and_the_rest_is_exact(dtype, kind) -> None:
    for size in SIZES:
        for block in (1, 7, 64, 256, 4096):
            for offset in (0, 3):
                values = random_values(size, kind, 7 * size + block)
                codes, steps, rest = quantized_by_core(values, block, dtype, offset)
                for begin in range(0, size, block):
                    part = slice(begin, begin + block)
                    check_block(
                        values[part].numpy(), codes[part].numpy(), steps[begin // block].numpy(),
                        rest[part].numpy(), dtype,
                    )  # fmt: skip
                again = quantized_by_core(values, block, dtype, in_place=True)
                for one, other in zip((codes, steps, rest), again, strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_is_code_times_step_and_special_values_stay(dtype, kind) -> None:
    table = code_values(dtype).astype(np.float32)
    for size in SIZES:
        for block in (5, 256):
            values = random_values(size, kind, size + block)
            codes, steps, _ = quantized_by_core(values, block, dtype)
            each = np.repeat(np.abs(steps.numpy()), block)[:size]
            onto = torch.linspace(-1, 1, size)
            for weight in (1.0, np.float32(1 / 3)):
                found = decoded_by_core(codes, steps, block, dtype, float(weight))
                added = decoded_by_core(codes, steps, block, dtype, float(weight), onto)
                for special in (torch.isnan, torch.isposinf, torch.isneginf):
                    assert torch.equal(special(found), special(values))
                finite = torch.isfinite(values)
                expected = torch.from_numpy(table[codes.numpy()] * (each * np.float32(weight)))
                assert torch.equal(found[finite], expected[finite])
                assert torch.equal(added[finite], (onto + expected)[finite])
                assert torch.equal(added[~finite].isnan(), values[~finite].isnan())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_torch_finds_the_same_where_streams_order_operations(dtype) -> None:
    for kind in KINDS:
        for size in (1, 16, 1000):
            values = random_values(size, kind, size)
            found = []
            for in_core in (True, False):
                parts = quantized.Parts(size, 3, dtype, 64, True, in_core)
                rest, result = torch.zeros(size), torch.zeros(size)
                message = parts.encode(values, rest)
                third = message[: parts.part_bytes].repeat(3)
                left = torch.zeros(parts.span(0).stop)
                reduced = parts.reduce(third, 0, left)
                parts.decode(message, result)
                bits = [t.nan_to_num(nan=5.0).view(torch.uint8) for t in (rest, result, left)]
                found.append(torch.cat([message, reduced, *bits]))
            assert torch.equal(*found), (kind, size)


def test_a_range_may_be_split_at_blocks() -> None:
    values = random_values(1000, "special", 1)
    whole = quantized_by_core(values, 64, torch.int8)
    halves = [quantized_by_core(part, 64, torch.int8) for part in values.split(512)]
    for one, *others in zip(whole, *halves, strict=True):
        assert torch.equal(one.view(torch.uint8), torch.cat(others).view(torch.uint8))


def test_a_mode_that_flushes_subnormals_changes_nothing() -> None:
    values = random_values(1000, "subnormal", 3)
    expected = quantized_by_core(values, 96, torch.int8)
    back = decoded_by_core(*expected[:2], 96, torch.int8)
    assert back.any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        found = quantized_by_core(values, 96, torch.int8)
        again = decoded_by_core(*found[:2], 96, torch.int8)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip((*found, again), (*expected, back), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_wrong_formats_and_blocks_are_refused() -> None:
    for call in (
        lambda block, code: _native.quantize(0, 0, 0, 0, 0, block, code),
        lambda block, code: _native.dequantize(0, 0, 0, 0, block, code, 1.0, False),
    ):
        with pytest.raises(ValueError, match="to int8 or float8_e4m3fn, not to float16"):
            call(1, NATIVE_CODES[torch.float16])
        with pytest.raises(ValueError, match="a block has at least one element"):
            call(0, NATIVE_CODES[torch.int8])
        call(1, NATIVE_CODES[torch.int8])
