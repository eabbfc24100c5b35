"""The quantizing kernels as functions on tensors, and values that are hard to quantize."""

from __future__ import annotations

import hashlib
import math

import torch

from collectives import _native
from collectives.core import quantized
from collectives.core.native_dtypes import NATIVE_CODES

FORMATS = quantized.FORMATS
SIZES = (0, 1, 3, 16, 31, 64, 257, 1000)
GUARD = 0xA5


def code_values(dtype):
    """Returns the number that each byte stands for, of codes that are finite."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()


def random_values(size, kind, seed):
    """Returns values of a kind that is hard to quantize."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).mul(3).exp()
    if kind == "subnormal":
        values *= 1e-43
    elif kind == "huge" and size:
        values[size // 2] = 3.4028234e38
    elif kind == "special":
        for special in (math.inf, -math.inf, math.nan):
            values[torch.rand(size, generator=generator) < 0.05] = special
    elif kind == "zeros":
        values = torch.zeros(size)
    elif kind == "ties":
        values = torch.randint(-254, 255, (size,), generator=generator) / 2.0
    elif kind == "bits":
        values = torch.randint(-(2**31), 2**31, (size,), generator=generator).int().view(torch.float32)
    return values


KINDS = ("plain", "subnormal", "huge", "special", "zeros", "ties", "bits")


def quantized_by_core(values, block, dtype, offset=0, in_place=False):
    """Returns codes, steps and the rest, from memory at an offset and with guards around it."""
    count = values.numel()
    codes = torch.full((offset + count + 8,), GUARD, dtype=torch.uint8)
    steps = torch.full((offset + 4 * -(-count // block) + 8,), GUARD, dtype=torch.uint8)
    memory = torch.full((offset + 4 * count + 8,), GUARD, dtype=torch.uint8)
    memory[offset : offset + 4 * count] = values.view(torch.uint8)
    rest = memory if in_place else torch.full_like(memory, GUARD)
    _native.quantize(
        codes.data_ptr() + offset,
        steps.data_ptr() + offset,
        memory.data_ptr() + offset,
        rest.data_ptr() + offset,
        count,
        block,
        NATIVE_CODES[dtype],
    )
    for written in (codes, steps, memory, rest):
        assert (written[:offset] == GUARD).all()
        assert (written[-8:] == GUARD).all()
    return (
        codes[offset:-8],
        steps[offset:-8].clone().view(torch.float32),
        rest[offset:-8].clone().view(torch.float32),
    )


def decoded_by_core(codes, steps, block, dtype, weight=1.0, onto=None):
    result = torch.full((codes.numel(),), 7.0) if onto is None else onto.clone()
    steps, codes = steps.contiguous(), codes.contiguous()
    _native.dequantize(
        result.data_ptr(), codes.data_ptr(), steps.data_ptr(), codes.numel(), block, NATIVE_CODES[dtype],
        weight, onto is not None,
    )  # fmt: skip
    return result


def digest():
    """Returns a hash over codes, steps, rests and what comes back, at sizes around every vector width."""
    total = hashlib.sha256()
    for dtype in FORMATS:
        for kind in KINDS:
            for size in (*SIZES, 1029):
                values = random_values(size, kind, size)
                codes, steps, rest = quantized_by_core(values, 96, dtype)
                back = decoded_by_core(codes, steps, 96, dtype, 1 / 3, torch.ones(size))
                for tensor in (codes, steps, rest.nan_to_num(nan=5.0), back.nan_to_num(nan=5.0)):
                    total.update(tensor.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
