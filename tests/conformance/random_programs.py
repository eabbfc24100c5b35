"""Random programs against the oracle: all ranks draw the same operations, each when it waits for them.

Operations, data types, reductions, sizes, layouts and roots are mixed over the world and overlapping
sub-groups, synchronous and asynchronous.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from conformance.oracle import DTYPES, OPS, Placed, Report, place, values

import collectives as dist
from collectives import ProcessGroup, ReduceOp, Work

COUNTS = (0, 1, 7, 60, 1009)
LAYOUTS = ("dense", "offset", "strided", "transposed")

Expected = list[tuple[Placed, list[torch.Tensor], ReduceOp | None]]
"""Outputs, what each is made of in the order of the ranks, and the reduction; ``None`` for moves."""


@dataclass
class Step:
    """One operation as its members see it; ranks count within the group."""

    drawn: Drawn
    group: ProcessGroup

    def __post_init__(self) -> None:
        self.me, self.size = self.group.rank(), self.group.size()
        self.about = {"group": self.group, "async_op": self.drawn.asynchronous}

    def of(self, rank: int, part: int = 0, count: int | None = None) -> torch.Tensor:
        return values(
            self.drawn.dtype,
            rank,
            self.drawn.count if count is None else count,
            97 * self.drawn.number + part,
        )

    def given(self, part: int = 0, count: int | None = None) -> torch.Tensor:
        return place(self.of(self.me, part, count), self.drawn.layouts[0]).tensor

    def blank(self, count: int | None = None) -> Placed:
        return place(self.of(self.size + 3, 90, count), self.drawn.layouts[1])

    def dense(self, count: int) -> Placed:
        return place(self.of(self.size + 3, 90, count), "dense")


def all_reduce(step: Step) -> tuple[Work | None, Expected]:
    mine = place(step.of(step.me), step.drawn.layouts[0])
    work = dist.all_reduce(mine.tensor, step.drawn.op, **step.about)
    return work, [(mine, [step.of(rank) for rank in range(step.size)], step.drawn.op)]


def all_reduce_into_tensor(step: Step) -> tuple[Work | None, Expected]:
    output = step.blank()
    work = dist.all_reduce_into_tensor(output.tensor, step.given(), step.drawn.op, **step.about)
    return work, [(output, [step.of(rank) for rank in range(step.size)], step.drawn.op)]


def reduce(step: Step) -> tuple[Work | None, Expected]:
    mine = place(step.of(step.me), step.drawn.layouts[0])
    work = dist.reduce(mine.tensor, op=step.drawn.op, group_dst=step.drawn.root, **step.about)
    inputs = [step.of(rank) for rank in range(step.size)]
    return work, [(mine, inputs, step.drawn.op)] if step.me == step.drawn.root else []


def reduce_scatter(step: Step) -> tuple[Work | None, Expected]:
    output = step.blank()
    work = dist.reduce_scatter(
        output.tensor, [step.given(r) for r in range(step.size)], step.drawn.op, **step.about
    )
    return work, [(output, [step.of(rank, step.me) for rank in range(step.size)], step.drawn.op)]


def reduce_scatter_tensor(step: Step) -> tuple[Work | None, Expected]:
    output, whole = step.blank(), step.drawn.count * step.size
    work = dist.reduce_scatter_tensor(output.tensor, step.of(step.me, 0, whole), step.drawn.op, **step.about)
    mine = slice(step.me * step.drawn.count, (step.me + 1) * step.drawn.count)
    return work, [(output, [step.of(rank, 0, whole)[mine] for rank in range(step.size)], step.drawn.op)]


def broadcast(step: Step) -> tuple[Work | None, Expected]:
    mine = place(step.of(step.me), step.drawn.layouts[0])
    work = dist.broadcast(mine.tensor, group_src=step.drawn.root, **step.about)
    return work, [(mine, [step.of(step.drawn.root)], None)]


def all_gather(step: Step) -> tuple[Work | None, Expected]:
    outputs = [step.blank() for _ in range(step.size)]
    work = dist.all_gather([output.tensor for output in outputs], step.given(), **step.about)
    return work, [(output, [step.of(rank)], None) for rank, output in enumerate(outputs)]


def all_gather_into_tensor(step: Step) -> tuple[Work | None, Expected]:
    output = step.dense(step.drawn.count * step.size)
    work = dist.all_gather_into_tensor(output.tensor, step.of(step.me), **step.about)
    return work, [(output, [step.of(rank) for rank in range(step.size)], None)]


def gather(step: Step) -> tuple[Work | None, Expected]:
    outputs = [step.blank() for _ in range(step.size)] if step.me == step.drawn.root else []
    tensors = [output.tensor for output in outputs] or None
    work = dist.gather(step.given(), tensors, group_dst=step.drawn.root, **step.about)
    return work, [(output, [step.of(rank)], None) for rank, output in enumerate(outputs)]


def scatter(step: Step) -> tuple[Work | None, Expected]:
    output = step.blank()
    parts = [step.given(rank) for rank in range(step.size)] if step.me == step.drawn.root else None
    work = dist.scatter(output.tensor, parts, group_src=step.drawn.root, **step.about)
    return work, [(output, [step.of(step.drawn.root, step.me)], None)]


def all_to_all(step: Step) -> tuple[Work | None, Expected]:
    outputs = [step.blank() for _ in range(step.size)]
    inputs = [step.given(rank) for rank in range(step.size)]
    work = dist.all_to_all([output.tensor for output in outputs], inputs, **step.about)
    return work, [(output, [step.of(rank, step.me)], None) for rank, output in enumerate(outputs)]


def all_to_all_single(step: Step) -> tuple[Work | None, Expected]:
    """Of uneven parts: rank ``r`` sends ``count + s`` elements to rank ``s``."""
    mine = [step.of(step.me, rank, step.drawn.count + rank) for rank in range(step.size)]
    output = step.dense((step.drawn.count + step.me) * step.size)
    work = dist.all_to_all_single(
        output.tensor,
        torch.cat(mine),
        [step.drawn.count + step.me] * step.size,
        [step.drawn.count + rank for rank in range(step.size)],
        **step.about,
    )
    return work, [
        (output, [step.of(rank, step.me, step.drawn.count + step.me) for rank in range(step.size)], None)
    ]


def barrier(step: Step) -> tuple[Work | None, Expected]:
    return dist.barrier(**step.about), []


def message(step: Step) -> tuple[Work | None, Expected]:
    """From the root to the next rank."""
    receiver = (step.drawn.root + 1) % step.size
    if step.me == step.drawn.root != receiver:
        return dist.isend(step.given(), group=step.group, tag=step.drawn.number, group_dst=receiver), []
    if step.me != receiver or step.drawn.root == receiver:
        return None, []
    output = step.blank()
    work = dist.irecv(output.tensor, group=step.group, tag=step.drawn.number, group_src=step.drawn.root)
    return work, [(output, [step.of(step.drawn.root)], None)]


OPERATIONS: dict[str, Callable[[Step], tuple[Work | None, Expected]]] = {
    function.__name__: function
    for function in (
        all_reduce, all_reduce_into_tensor, reduce, reduce_scatter, reduce_scatter_tensor, broadcast,
        all_gather, all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single, barrier,
    )
} | {"send": message}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One operation as all ranks draw it; ``group`` counts those of the program."""

    number: int
    group: int
    name: str
    dtype: torch.dtype
    op: ReduceOp
    count: int
    layouts: tuple[str, str]
    root: int
    asynchronous: bool

    def __str__(self) -> str:
        what = f"{self.name} {self.dtype} {self.op.name} {self.count} {self.layouts} root {self.root}"
        return f"step {self.number}, {what}{' async' if self.asynchronous else ''} on group {self.group}"


class Program:
    """What all ranks do, drawn from a seed: ``members`` of each group, the world first, and ``steps``."""

    def __init__(self, seed: int | str, size: int, steps: int, counts: Sequence[int] = COUNTS) -> None:
        dice = random.Random(seed)
        self.seed = seed
        self.members = [list(range(size))]
        self.members += [sorted(dice.sample(range(size), dice.randint(2, size))) for _ in range(2)]
        self.steps = [self._draw(dice, number, counts) for number in range(steps)]

    def _draw(self, dice: random.Random, number: int, counts: Sequence[int]) -> Drawn:
        index = dice.randrange(len(self.members))
        name, dtype, op = dice.choice(list(OPERATIONS)), dice.choice(DTYPES), dice.choice(OPS)
        layouts = dice.choice(LAYOUTS), dice.choice(LAYOUTS)
        root = dice.randrange(len(self.members[index]))
        return Drawn(number, index, name, dtype, op, dice.choice(counts), layouts, root, dice.random() < 0.6)


class Execution:
    """A program, as one rank of the default group runs it.

    Args:
        program: what all ranks do.
        rank: this rank; it draws on its own when it waits for what.
        placement: a letter for the machine of each rank, which decides the order of reductions.
    """

    def __init__(self, program: Program, rank: int, placement: str = "") -> None:
        self.program = program
        self.own_dice = random.Random(f"{program.seed} {rank}")
        world = dist.group.WORLD
        self.groups = [world, *(dist.new_group(ranks) for ranks in program.members[1:])]
        letters = [[placement[one : one + 1] for one in ranks] for ranks in program.members]
        self.machines = [
            [[r for r, its in enumerate(of_group) if its == one] for one in dict.fromkeys(of_group)]
            for of_group in letters
        ]
        self.report = Report(world)
        self.pending: list[tuple[Drawn, Work | None, Expected]] = []

    def run(self) -> None:
        for drawn in self.program.steps:
            self.step(drawn)
            while self.pending and self.own_dice.random() < 0.4:
                self.finish_one()
        self.finish_all()

    def attempt(self, drawn: Drawn, waiting: bool, call: Callable[[], object]) -> bool:
        """Issues a step, or waits for it; returns whether it did so, where errors are none of the test's."""
        self.report.run(f"{drawn}, waited for" if waiting else f"{drawn}", call)
        return True

    def step(self, drawn: Drawn) -> None:
        group = self.groups[drawn.group]
        if not isinstance(group, ProcessGroup):
            return  # this rank is no member
        about = {"op": drawn.op} if "reduce" in drawn.name else {}
        if drawn.name != "barrier" and not group.supports(
            drawn.name, device="cpu", dtype=drawn.dtype, **about
        ):
            return
        step = Step(drawn, group)

        def issue() -> None:
            work, expected = OPERATIONS[drawn.name](step)
            self.pending.append((drawn, work, expected))

        self.attempt(drawn, False, issue)

    def finish_all(self) -> None:
        while self.pending:
            self.finish_one()

    def finish_one(self) -> None:
        """Waits for any operation under way, and compares what it gave."""
        drawn, work, expected = self.pending.pop(self.own_dice.randrange(len(self.pending)))
        if work is not None and not self.attempt(drawn, True, work.wait):
            return
        for output, inputs, op in expected:
            if op is None:
                self.report.same(str(drawn), output.tensor, torch.cat(inputs))
            else:
                self.report.reduced(str(drawn), output.tensor, inputs, op, self.machines[drawn.group])
            self.report.whole(str(drawn), output)
