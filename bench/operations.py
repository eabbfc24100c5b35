"""What each measured operation moves: sizes of inputs and outputs, values, and traffic.

The *size* of an operation is that of nccl-tests: the bytes of the whole array. Where the array consists of
one part for each rank (``all_gather``, ``reduce_scatter``, ``all_to_all``, ``gather``, ``scatter``), a part
is the size over the number of ranks. The root, where there is one, is rank 0.

``sendrecv`` is a ping-pong between the ranks 2k and 2k+1, all pairs at the same time; half of its time
counts. An odd rank out is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch

from collectives.core import operations as core

ROOT = 0
"""The rank that sends or receives the whole in operations that have such a rank."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation by its shape.

    Attributes:
        name: of the collective, or what the measurement is called.
        functions: names of the user functions behind it, as capabilities call them.
        reduces: whether it computes.
        in_place: whether one tensor is input and output.
        parts: whether the array consists of a part for each rank.
        rooted: whether one rank is special.
        halved: whether half of the time counts, as of a ping-pong.
    """

    name: str
    functions: tuple[str, ...]
    reduces: bool = False
    in_place: bool = False
    parts: bool = False
    rooted: bool = False
    halved: bool = False

    def input_count(self, count: int, rank: int, ranks: int) -> int:
        """Returns the elements of a rank's input, of an array of ``count`` elements."""
        if self.name in {"all_gather", "gather"}:
            return count // ranks
        if self.name == "scatter" and rank != ROOT:
            return 0
        return 0 if self.name == "sendrecv" and partner(rank, ranks) is None else count

    def output_count(self, count: int, rank: int, ranks: int) -> int:
        """Returns the elements of a rank's output, of an array of ``count`` elements."""
        if self.name in {"reduce_scatter", "scatter"}:
            return count // ranks
        if self.name == "gather" and rank != ROOT:
            return 0
        return 0 if self.name == "sendrecv" and partner(rank, ranks) is None else count


def _measured(row: core.Operation) -> Operation:
    parts = not {row.output, row.input}.isdisjoint({core.Operand.EACH, core.Operand.PARTS})
    in_place = row.in_place and row is not core.BARRIER
    return Operation(row.collective, (row.name,), row.reduces, in_place, parts, row.rooted)


_COLLECTIVES = (
    core.ALL_REDUCE, core.REDUCE, core.BROADCAST, core.ALL_GATHER_INTO_TENSOR, core.REDUCE_SCATTER_TENSOR,
    core.ALL_TO_ALL_SINGLE, core.GATHER, core.SCATTER,
)  # fmt: skip

OPERATIONS = {
    operation.name: operation
    for operation in (
        *map(_measured, _COLLECTIVES),
        Operation("sendrecv", ("send", "recv"), halved=True),
        _measured(core.BARRIER),
    )
}
"""Every measured operation by name."""


def partner(rank: int, ranks: int) -> int | None:
    """Returns whom a rank plays ping-pong with; ``None`` for the odd rank out."""
    other = rank ^ 1
    return other if other < ranks else None


def rounded_count(operation: Operation, size_bytes: int, item_bytes: int, ranks: int) -> int:
    """Returns the elements of an array of ``size_bytes``, rounded up to whole parts; 0 for a barrier."""
    if operation.name == "barrier":
        return 0
    count = -(-size_bytes // item_bytes)
    return -(-count // ranks) * ranks if operation.parts else count


def bus_factor(operation: str, ranks: int) -> float | None:
    """Returns bus bandwidth over algorithm bandwidth, as nccl-tests defines them.

    The least traffic of any link, relative to the size: 2(n-1)/n for an all-reduce of n ranks, (n-1)/n where
    the array consists of parts, 1 for the others; ``None`` where no data are communicated.
    """
    if operation == "barrier":
        return None
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if OPERATIONS[operation].parts else 1.0


def input_values(
    operation: Operation, redop: str, dtype: torch.dtype, count: int, rank: int, ranks: int
) -> torch.Tensor:
    """Returns a rank's input for an array of ``count`` elements."""
    op = _pattern(operation, redop)
    return source(op, dtype, operation.input_count(count, rank, ranks), rank, ranks)


def wanted_values(
    operation: Operation, redop: str, dtype: torch.dtype, count: int, rank: int, ranks: int
) -> torch.Tensor | None:
    """Returns what a rank's output must be, computed from the formula of all ranks' inputs.

    ``None`` where an operation says nothing about the rank's tensor: ``reduce`` elsewhere than on the root.
    """
    op, part, name = _pattern(operation, redop), count // ranks, operation.name
    if name == "reduce" and rank != ROOT:
        return None
    if name in {"all_reduce", "reduce"}:
        return expected(op, dtype, count, ranks)
    if name == "reduce_scatter":
        return expected(op, dtype, part, ranks, rank * part)
    if operation.output_count(count, rank, ranks) == 0:
        return torch.empty(0, dtype=dtype)
    if name == "broadcast":
        return source(op, dtype, count, ROOT, ranks)
    if name == "scatter":
        return source(op, dtype, part, ROOT, ranks, rank * part)
    if name == "sendrecv":
        return source(op, dtype, count, rank ^ 1, ranks)
    begin = rank * part if name == "all_to_all" else 0
    return torch.cat([source(op, dtype, part, other, ranks, begin) for other in range(ranks)])


def _pattern(operation: Operation, redop: str) -> str:
    """Returns the name of the reduction whose formula gives the values."""
    return redop if operation.reduces else "max"  # many different values


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


def count_wrong(result: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.0) -> int:
    """Returns how many elements are off by more; a NaN is always wrong."""
    if tolerance:
        return int((~((result.double() - wanted.double()).abs() <= tolerance)).sum())
    if torch.equal(result, wanted):
        return 0
    return int(torch.ne(result, wanted).sum())
