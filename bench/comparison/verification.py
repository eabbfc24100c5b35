"""Inputs whose results are known: a formula of rank and position, exact in every data type.

Element i on rank r depends on ``i mod PERIOD`` and r. The period is prime, so that a part which lands at a
wrong place by a power of two is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch

__all__ = ["REDUCTIONS", "count_wrong", "expected", "resting", "source"]

PERIOD = 251

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""Names of the reductions with a formula."""

_MERGE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _values(op: str, rank: int, size: int) -> torch.Tensor:
    """Returns one period of rank's values as int64."""
    # Scattered by a multiplicative hash, so that over no number of ranks the result is the same everywhere.
    scattered = torch.arange(1, PERIOD + 1) * (2 * rank + 3) * 40503 >> 5
    if op == "sum":
        return scattered % 3
    if op == "avg":  # multiples of size, so that the mean is a whole number
        return scattered % 3 * size
    if op == "product":
        return scattered % 2 + 1
    return scattered % 11


def _tiled(period: torch.Tensor, count: int, begin: int) -> torch.Tensor:
    rolled = period.roll(-(begin % PERIOD))
    return rolled.repeat(-(-count // PERIOD))[:count].contiguous()


def source(op: str, dtype: torch.dtype, count: int, rank: int, size: int, begin: int = 0) -> torch.Tensor:
    """Returns ``count`` elements of a rank's input; a shorter input is the front of a longer one.

    Args:
        op: a name of :data:`REDUCTIONS`.
        dtype: data type of the tensor.
        count: number of elements.
        rank: whose input.
        size: number of ranks.
        begin: position of the first element.
    """
    return _tiled(_values(op, rank, size).to(dtype), count, begin)


def expected(op: str, dtype: torch.dtype, count: int, size: int, begin: int = 0) -> torch.Tensor:
    """Returns the reduction of all ranks' inputs from element ``begin``, computed in int64, rounded once."""
    total = reduce(_MERGE[op], (_values(op, rank, size) for rank in range(size)))
    if op == "avg":
        total //= size
    return _tiled(total.to(dtype), count, begin)


def resting(op: str) -> int:
    """Returns a number that the reduction leaves as it is when all ranks hold it."""
    return 0 if op in {"sum", "avg", "bxor"} else 1


def count_wrong(result: torch.Tensor, wanted: torch.Tensor) -> int:
    """Returns how many elements are not bitwise-equal numbers; a NaN is always wrong."""
    if torch.equal(result, wanted):
        return 0
    return int(torch.ne(result, wanted).sum())
