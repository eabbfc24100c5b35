"""Which reductions the kernels of the C++ core have, for the backends that compute with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

import collectives._native as _native
from collectives.core.native_dtypes import NATIVE_CODES
from collectives.core.types import ReduceOp

_AVG = ReduceOp.AVG.code


def _reductions() -> Mapping[torch.dtype, frozenset[str]]:
    table = {
        dtype: frozenset(
            name for name, op in ReduceOp.__members__.items() if _native.reducible(code, op.code)
        )
        for dtype, code in NATIVE_CODES.items()
    }
    return MappingProxyType({dtype: names for dtype, names in table.items() if names})


REDUCTIONS: Final = _reductions()
"""For each data type that the kernels reduce, the names of its reductions."""


def kernel_factor(op: ReduceOp, ranks: int) -> float:
    """Returns what the kernels are given as ``factor``: the divisor of AVG, the multiplier of PREMUL_SUM."""
    if op.code == _AVG:
        return float(ranks)
    return 1.0 if op.factor is None else op.factor
