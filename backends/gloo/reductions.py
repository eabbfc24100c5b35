"""How reductions that Gloo lacks are computed from those that it has.

Where Gloo cannot reduce a tensor as it is, it reduces a wire tensor that a conversion makes of it. Integers
wrap around, and their average is the exact sum divided and truncated toward zero; on ``bool``, SUM and MAX
are "or", PRODUCT and MIN are "and".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as torch_distributed

from collectives.core.types import ReduceOp

_ARITHMETIC = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})
_BITWISE = frozenset({"BAND", "BOR", "BXOR"})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_NATIVE_INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_INTS = (*_NATIVE_INTS, torch.int16, torch.uint16, torch.uint32, torch.uint64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)

REDUCTIONS: Mapping[torch.dtype, frozenset[str]] = {
    torch.bool: (_ARITHMETIC | _BITWISE) - {"AVG"},
    **dict.fromkeys(_INTS, _ARITHMETIC | _BITWISE),
    **dict.fromkeys((*_FLOATS, *_FLOAT8), _ARITHMETIC | {"PREMUL_SUM"}),
    # The format has neither a sign nor a zero that could hold the product with any factor.
    torch.float8_e8m0fnu: _ARITHMETIC,
    **dict.fromkeys(_COMPLEX, frozenset({"SUM", "AVG", "PREMUL_SUM"})),
}
"""The reductions of every data type, native or derived."""

_WIDER = {
    **dict.fromkeys((*_FLOAT8, torch.float8_e8m0fnu), torch.float32),
    torch.complex32: torch.complex64,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Data types that Gloo refuses, and wider ones to hold their values; integer sums keep their low bits."""

_SIGN = torch.iinfo(torch.int64).min
_TORCH_OP = torch_distributed.ReduceOp


@dataclass(frozen=True)
class WireConversion:
    """A reduction by way of a wire tensor.

    Attributes:
        op: reduction of the wire tensor, one of ``torch.distributed``.
        to_wire: makes the wire tensor, a new dense one, from a dense tensor.
        from_wire: makes the result from the reduced wire tensor; any shape of the right number of elements.
    """

    op: _TORCH_OP.RedOpType
    to_wire: Callable[[torch.Tensor], torch.Tensor]
    from_wire: Callable[[torch.Tensor], torch.Tensor]


def reduction_for(dtype: torch.dtype, op: ReduceOp, size: int) -> WireConversion | _TORCH_OP.RedOpType:
    """Returns Gloo's own reduction where it can reduce tensors of ``dtype`` in place, else the conversion.

    Args:
        dtype: a key of :data:`REDUCTIONS`.
        op: one of its reductions.
        size: number of ranks.
    """
    if op.name == "PREMUL_SUM":
        return _premultiplied(dtype, op.factor or 0.0)
    if dtype is torch.bool:
        return _native({"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op.name, op.name))
    if op.name == "AVG" and dtype in _INTS:
        return _wide_average(dtype, size) if dtype.itemsize == 8 else _average(dtype, size)
    if dtype is torch.uint64:
        return _unsigned_64(op)
    wide = _WIDER.get(dtype)
    if wide is None:
        return _native(op.name)
    return WireConversion(_native(op.name), lambda x: x.to(wide), lambda x: x.to(dtype))


def _native(name: str) -> _TORCH_OP.RedOpType:
    found: _TORCH_OP.RedOpType = getattr(_TORCH_OP.RedOpType, name)
    return found


def _premultiplied(dtype: torch.dtype, factor: float) -> WireConversion:
    """Products and sums in the wide type, one rounding at the end."""
    wide = torch.float32 if dtype in {torch.float16, torch.bfloat16} else _WIDER.get(dtype, dtype)
    return WireConversion(_native("SUM"), lambda x: x.to(wide) * factor, lambda x: x.to(dtype))


def _average(dtype: torch.dtype, size: int) -> WireConversion:
    """An exact sum in 64 bits."""
    return WireConversion(
        _native("SUM"),
        lambda x: x.to(torch.int64, copy=True),
        lambda x: torch.div(x, size, rounding_mode="trunc").to(dtype),
    )


def _wide_average(dtype: torch.dtype, size: int) -> WireConversion:
    """An exact sum of 64-bit values in two words: one of their upper halves and one of the lower."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        x = x.view(torch.int64).reshape(-1)
        upper = x >> 32
        if dtype is torch.uint64:
            upper &= 0xFFFFFFFF
        return torch.stack([upper, x & 0xFFFFFFFF])

    def divide(wire: torch.Tensor) -> torch.Tensor:
        # upper * 2^32 + lower = size * (quotient * 2^32) + rest with 0 <= rest, so that floor division is
        # exact.
        upper, lower = wire[0], wire[1]
        quotient = torch.div(upper, size, rounding_mode="floor")
        rest = ((upper - quotient * size) << 32) + lower
        floor = (quotient << 32) + torch.div(rest, size, rounding_mode="floor")
        if dtype is torch.int64:
            floor += (floor < 0) & (rest % size != 0)
        return floor.view(dtype)

    return WireConversion(_native("SUM"), halves, divide)


def _unsigned_64(op: ReduceOp) -> WireConversion:
    """The same bits as signed integers; an order is kept by turning the sign bit."""
    flip = _SIGN if op.name in {"MIN", "MAX"} else 0
    return WireConversion(
        _native(op.name),
        lambda x: x.view(torch.int64) ^ flip,
        lambda x: (x ^ flip).view(torch.uint64),
    )
