"""What NCCL can reduce, and the codes for it.

NCCL computes with the types of :data:`~collectives.backends.nccl.libnccl.codes.DATA_TYPES`. Beyond those, a
complex number is two real ones for SUM, AVG and PREMUL_SUM, and a bool is a byte of 0 or 1, of which the
maximum is the logical "or" and the minimum the logical "and".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collectives.backends.nccl.libnccl.codes import DATA_TYPES, REDUCTIONS, NcclDataType, NcclRedOp
from collectives.core.capabilities import OPERATIONS, Capabilities
from collectives.core.types import ReduceOp

__all__ = ["FLOAT8_VERSION", "Reduction", "capabilities_on", "reduction_of"]

FLOAT8_VERSION = 22400
"""The first version of NCCL that computes with 8-bit floats."""

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_PARTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_BUILT_IN = frozenset(op.name for op in REDUCTIONS)
_FACTORED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_OF_BOOLS = {
    "SUM": NcclRedOp.MAX, "MAX": NcclRedOp.MAX, "BOR": NcclRedOp.MAX,
    "PRODUCT": NcclRedOp.MIN, "MIN": NcclRedOp.MIN, "BAND": NcclRedOp.MIN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of tensors of one data type, in NCCL's terms.

    Attributes:
        dtype: code of the type that NCCL computes with.
        width: elements of that type in one element of the tensor.
        op: code of the reduction; with a ``factor`` one has to be made.
        factor: what PREMUL_SUM multiplies by.
    """

    dtype: NcclDataType
    width: int
    op: NcclRedOp
    factor: float | None = None


_WITHOUT_FACTOR = {
    (dtype, op.name): Reduction(DATA_TYPES[_PARTS.get(dtype, dtype)], 2 if dtype in _PARTS else 1, code)
    for dtype in (*DATA_TYPES, *_PARTS)
    for op, code in REDUCTIONS.items()
} | {(torch.bool, name): Reduction(NcclDataType.UINT8, 1, code) for name, code in _OF_BOOLS.items()}


def reduction_of(dtype: torch.dtype, op: ReduceOp) -> Reduction:
    """Returns a reduction that the capabilities offer."""
    if op.factor is None:
        return _WITHOUT_FACTOR[dtype, op.name]
    real = _PARTS.get(dtype, dtype)
    return Reduction(DATA_TYPES[real], 2 if dtype in _PARTS else 1, NcclRedOp.SUM, op.factor)


def capabilities_on(device: str, float8: bool) -> Capabilities:
    """Returns what a group can do.

    Args:
        device: type of the tensors' device.
        float8: whether NCCL and the device compute with 8-bit floats.
    """
    table = {dtype: _BUILT_IN for dtype in DATA_TYPES if float8 or dtype not in _FLOAT8}
    table |= {dtype: _BUILT_IN | {"PREMUL_SUM"} for dtype in _FACTORED}
    table |= {dtype: frozenset({"SUM", "AVG", "PREMUL_SUM"}) for dtype in _PARTS}
    table[torch.bool] = frozenset(_OF_BOOLS)
    return Capabilities(
        devices=frozenset({device}),
        reductions=table,
        operations=frozenset(OPERATIONS) - {"recv_anysource"},
        tags=False,
    )
