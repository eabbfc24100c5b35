"""The collectives as cases: what each rank gives, how a front end is called, and what must come out.

A *piece* is what one rank gives to a collective: the rank, and a number that is 0 where it gives one tensor,
the receiver where it gives one for each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as torch_dist
from conformance.oracle import BYTES_ONLY, DTYPES, OPS, Placed, Report, place, raw, values

from collectives import ProcessGroup, ReduceOp, Work
from collectives.core.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    GATHER,
    OPERATIONS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
    SCATTER,
    Operand,
    Operation,
)

Piece = tuple[int, int]
Issue = Callable[..., Work | None]
"""Takes an operation, outputs and inputs, and by name ``op``, ``root``, ``async_op`` and ``splits``."""

BY_NAME = {operation.name: operation for operation in OPERATIONS}
UNEVEN = {ALL_GATHER, ALL_TO_ALL, ALL_TO_ALL_SINGLE, REDUCE_SCATTER}
"""Those whose pieces may differ in length."""
ONCE = 3
"""Tensors of a coalesced operation."""
LARGE = 300_007
PATHS = (22, 23, 4099, 16_385, 100_003, LARGE)
"""Counts of float32 that backends of our own move inline, at once and in chunks with an uneven end."""
SHAPES = (
    *((count, "dense") for count in (0, 1, 7, 1009)),
    *((1, "scalar"), (0, "strided"), (65, "strided"), (60, "transposed"), (131, "offset")),
)


# ---- what a collective is --------------------------------------------------------------------------------


def given(operation: Operation, rank: int, size: int, root: int) -> list[Piece]:
    """Returns the pieces that a rank gives."""
    operand = operation.output if operation.in_place else operation.input
    if operand is Operand.NONE or (operation is SCATTER and rank != root):
        return []
    return [(rank, part) for part in range({Operand.ONE: 1, Operand.SEVERAL: ONCE}.get(operand, size))]


def taken(operation: Operation, me: int, size: int, root: int) -> list[list[Piece]]:
    """Returns the pieces that each output of a rank is made of; several are reduced, in this order."""
    all_ranks = range(size)
    parts = range(ONCE if operation is ALL_REDUCE_COALESCED else 1)
    made: dict[str, list[list[Piece]]] = {
        "all_reduce": [[(rank, part) for rank in all_ranks] for part in parts],
        "broadcast": [[(root, 0)]],
        "reduce": [[(rank, 0) for rank in all_ranks]] if me == root else [[(me, 0)]],
        "all_gather": [[(rank, 0)] for rank in all_ranks],
        "gather": [[(rank, 0)] for rank in all_ranks if me == root],
        "scatter": [[(root, me)]],
        "reduce_scatter": [[(rank, me) for rank in all_ranks]],
        "all_to_all": [[(rank, me)] for rank in all_ranks],
        "barrier": [],
    }
    return made[operation.collective]


def operands(
    operation: Operation,
    me: int,
    size: int,
    root: int,
    piece: Callable[[Piece], torch.Tensor],
    lay: Callable[[Operand, list[torch.Tensor]], list[Any]],
    blank: Callable[[Piece], torch.Tensor] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Returns outputs and inputs of a rank.

    Args:
        operation: the collective.
        me: this rank.
        size: number of ranks.
        root: the root.
        piece: makes a piece.
        lay: makes an operand of pieces.
        blank: makes what an output has before, as long as the piece that it gets first.
    """
    mine = [piece(one) for one in given(operation, me, size, root)]
    if operation.in_place:
        return lay(operation.output, mine), []
    wanted = taken(operation, me, size, root)
    return lay(operation.output, [(blank or piece)(one) for one, *_ in wanted]), lay(operation.input, mine)


def plain(operation: Operation, me: int, size: int, root: int) -> tuple[list[Any], list[Any]]:
    """Returns outputs and inputs of two ones for each rank."""

    def lay(kind: Operand, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(flat)] if kind is Operand.PARTS else flat

    return operands(operation, me, size, root, lambda _: torch.ones(2), lay)


# ---- front ends ------------------------------------------------------------------------------------------


def operand(kind: Operand, tensors: list[torch.Tensor]) -> Any:
    """Returns tensors as an argument."""
    return tensors[0] if kind in {Operand.ONE, Operand.PARTS} else tensors or None


def by_group(group: ProcessGroup) -> Issue:
    """Returns what issues cases by a group of ours."""

    def issue(
        operation: Operation, outputs: list[Any], inputs: list[Any], *, splits: Any = None, **about: Any
    ) -> Work:
        by_name = {"output_split_sizes": splits[0], "input_split_sizes": splits[1]} if splits else {}
        operands = operand(operation.output, outputs), operand(operation.input, inputs)
        return group.call(operation, *operands, **about, **by_name)

    return issue


def by_functions(dist: ModuleType, other_names: bool = False) -> Issue:
    """Returns what issues cases by functions of our package or of ``torch.distributed``, in their world."""
    roots = {BROADCAST: "group_src", SCATTER: "group_src", REDUCE: "group_dst", GATHER: "group_dst"}

    def issue(
        operation: Operation,
        outputs: list[Any],
        inputs: list[Any],
        *,
        op: ReduceOp,
        root: int,
        splits: Any,
        **about: Any,
    ) -> Work | None:
        names = [name for name in (*operation.methods[:1], operation.name) if hasattr(dist, name)]
        operands = [operand(operation.output, outputs)]
        if not operation.in_place:
            operands.append(operand(operation.input, inputs))
        if operation is GATHER:
            operands.reverse()
        if operation.reduces:
            about["op"] = op if dist is not torch_dist else _of_torch(op)
        if operation.rooted:
            about[roots[operation]] = root
        work: Work | None = getattr(dist, names[0 if other_names else -1])(
            *operands, *(splits or ()), **about
        )
        return work

    return issue


def _of_torch(op: ReduceOp) -> Any:
    if op.factor is not None:
        return torch._C._distributed_c10d._make_nccl_premul_sum(op.factor)
    return getattr(torch_dist.ReduceOp, op.name)


# ---- cases -----------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A collective on tensors of one kind.

    Attributes:
        turn: its number, by which manner, root and overlap of the operands change.
        uneven: whether pieces differ in length: ``"little"``, or ``"much"``, where rank 0's are long.
    """

    operation: Operation
    turn: int
    size: int
    dtype: torch.dtype
    count: int
    layout: str
    op: ReduceOp = ReduceOp.SUM
    uneven: str = ""

    def __post_init__(self) -> None:
        self.root = self.turn % self.size
        self.async_op = self.turn % 2 == 0
        self.overlaps = self.turn % 3 == 0 and self.layout == "dense"
        if Operand.PARTS in (self.operation.output, self.operation.input) and self.layout == "scalar":
            self.layout = "dense"
        if self.operation is ALL_TO_ALL_SINGLE and self.layout == "transposed":  # whose parts are rows
            self.layout = "strided"

    def __str__(self) -> str:
        what = (
            f"{self.operation.name} {self.dtype} {self.op.name} {self.count} {self.layout} root {self.root}"
        )
        return " ".join([what, self.uneven, "async" * self.async_op, "overlapping" * self.overlaps])

    def length(self, piece: Piece) -> int:
        giver, part = piece
        if self.operation.reduces:
            giver = part  # all ranks give alike
        if self.uneven == "little":
            return (self.count + 3 * giver + 5 * part) % 13
        if self.uneven == "much" and giver:
            return (giver + part) % 3
        return self.count

    def splits(self, me: int) -> tuple[list[int], list[int]] | None:
        """Returns the lengths that a rank receives and sends, where they are to be given."""
        if self.operation is not ALL_TO_ALL_SINGLE or not (self.uneven or self.turn % 4):
            return None
        if not self.uneven and self.turn % 4 == 1:
            return [], []
        ranks = range(self.size)
        return [self.length((r, me)) for r in ranks], [self.length((me, r)) for r in ranks]


def offered(
    group: ProcessGroup, operation: Operation, dtype: torch.dtype, op: ReduceOp, device: str = "cpu"
) -> bool:
    about = {"op": op} if operation.reduces else {}
    return group.supports(operation.offered_as, device=device, dtype=dtype, **about)


def data_types(
    group: ProcessGroup, operation: Operation, device: str
) -> Iterator[tuple[torch.dtype, list[ReduceOp]]]:
    """Yields the data types that a group takes, and the reductions of each; it must move all that there are.

    Of more than two ranks, Gloo and NCCL's double have one reduction of each, in turn: they need milliseconds
    for each, and what they do with a data type is the same for any number of ranks.
    """
    for turn, dtype in enumerate(DTYPES if operation.reduces else (*DTYPES, *BYTES_ONLY)):
        if not operation.reduces:
            assert offered(group, operation, dtype, ReduceOp.SUM, device), dtype
            yield dtype, [ReduceOp.SUM]
            continue
        ops = [op for op in OPS if offered(group, operation, dtype, op, device)]
        few = group.name() in {"gloo", "nccl"} and group.size() > 2
        yield dtype, ops[turn % len(ops) :][:1] if few and ops else ops


def cases(group: ProcessGroup, operation: Operation, device: str = "cpu") -> Iterator[Case]:
    """Yields the cases of a collective, for tensors of a type of devices."""
    turns, size = itertools.count(), group.size()
    uneven = group.capabilities.uneven and operation in UNEVEN
    for dtype, ops in data_types(group, operation, device):
        for op in ops:
            shapes = [one for one in SHAPES if dtype not in BYTES_ONLY or one[1] in {"dense", "scalar"}]
            # All shapes of float32 and of sums by all-reduce, else some in turn.
            summed = operation is ALL_REDUCE and op == ReduceOp.SUM
            if group.name() == "nccl" or not (dtype is torch.float32 or summed):
                few = range(2 if group.name() == "nccl" else 3)
                shapes = [shapes[(next(turns) + 3 * part) % len(shapes)] for part in few]
            for count, layout in shapes:
                yield Case(operation, next(turns), size, dtype, count, layout, op)
            if uneven:
                yield Case(operation, next(turns), size, dtype, 7, "dense", op, "little")
    for dtype, layout in ((torch.bfloat16, "dense"), (torch.uint8, "offset"), (torch.complex64, "strided")):
        if offered(group, operation, dtype, ReduceOp.SUM, device):
            yield Case(operation, next(turns), size, dtype, LARGE, layout)
    for count in PATHS if group.name() != "nccl" else PATHS[:1]:
        yield Case(operation, next(turns), size, torch.float32, count, "dense", uneven="much" * uneven)
        yield Case(operation, next(turns), size, torch.float32, count, "dense")


def few_cases(group: ProcessGroup, operation: Operation) -> Iterator[Case]:
    """Yields cases that tell one operand, root and manner from another."""
    for turn, (dtype, op) in enumerate(
        itertools.product((torch.float32, torch.int16), (ReduceOp.MAX, ReduceOp.SUM))
    ):
        for manner in range(group.size()):
            if offered(group, operation, dtype, op):
                yield Case(operation, 4 * manner + turn, group.size(), dtype, 7, "dense", op)


def joined(pieces: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Returns flat tensors of any data type as one."""
    return torch.cat([torch.empty(0, dtype=torch.uint8), *map(raw, pieces)]).view(dtype)


def run(
    report: Report, case: Case, issue: Issue, me: int, machines: list[list[int]], device: str = "cpu"
) -> list[torch.Tensor]:
    """Issues a case on a rank, and compares; returns the outputs."""
    operation, size = case.operation, case.size

    def piece(one: Piece) -> torch.Tensor:
        return values(case.dtype, one[0], case.length(one), salt=one[1])

    def lay(kind: Operand, flat: list[torch.Tensor]) -> list[Placed]:
        flat = [joined(flat, case.dtype)] if kind is Operand.PARTS else flat
        return [place(one, case.layout).on(device) for one in flat]

    def blank(one: Piece) -> torch.Tensor:
        return values(case.dtype, 77, case.length(one), salt=99)

    outputs, inputs = operands(operation, me, size, case.root, piece, lay, blank)
    kept, apart = inputs, outputs
    if case.overlaps and not case.uneven:
        kept, apart = _overlap(operation, me, case.count, inputs, outputs)
    before = [raw(one.tensor).clone() for one in kept]

    def both() -> None:
        tensors = [[one.tensor for one in placed] for placed in (outputs, inputs)]
        about = {"op": case.op, "root": case.root, "async_op": case.async_op, "splits": case.splits(me)}
        work = issue(operation, *tensors, **about)
        if work is not None:
            work.wait()

    report.run(str(case), both)
    expected = [list(map(piece, pieces)) for pieces in taken(operation, me, size, case.root)]
    if operation.output is Operand.PARTS:
        expected = [[joined([one for (one,) in expected], case.dtype)]]
    for number, (output, pieces) in enumerate(zip(outputs, expected, strict=True)):
        name = f"{case}, output {number}"
        if operation.reduces and len(pieces) == size:
            report.reduced(name, output.tensor, pieces, case.op, machines)
        else:
            report.same(name, output.tensor, pieces[0])
    for number, (one, former) in enumerate(zip(kept, before, strict=True)):
        report.same(f"{case}, input {number}", raw(one.tensor), former)
    report.whole(str(case), *kept, *apart)
    return [output.tensor for output in outputs]


def _overlap(
    operation: Operation, me: int, count: int, inputs: list[Placed], outputs: list[Placed]
) -> tuple[list[Placed], list[Placed]]:
    """Has operands be parts of each other, where a collective allows it.

    Returns the inputs that stay as they are, and the outputs that are not a part of another tensor.
    """
    mine = slice(me * count, (me + 1) * count)
    if operation is ALL_GATHER_INTO_TENSOR:
        part = outputs[0].tensor[mine]
        part.view(torch.uint8).copy_(raw(inputs[0].tensor))
        inputs[0].tensor = part
        return [], outputs
    if operation is REDUCE_SCATTER:
        outputs[0] = inputs[me]
        return [one for one in inputs if one is not outputs[0]], outputs
    if operation is REDUCE_SCATTER_TENSOR:
        outputs[0] = Placed(inputs[0].tensor[mine], inputs[0].buffer)
        return [], []
    return inputs, outputs
