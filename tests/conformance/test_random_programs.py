"""Random programs against the oracle: all ranks draw the same operations, each when it waits for them.

Operations, data types, reductions, sizes, layouts and roots are mixed over the world and overlapping
sub-groups, synchronous and asynchronous. A failure names the seed, which ``--seed`` repeats.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conformance.oracle import DTYPES, OPS, Placed, Report, place, values
from harness import run_world

import collectives as dist
from collectives import ProcessGroup, ReduceOp, Work

STEPS = 400
COUNTS = (0, 1, 7, 60, 1009)
LAYOUTS = ("dense", "offset", "strided", "transposed")

Expected = list[tuple[Placed, list[torch.Tensor], ReduceOp | None]]
"""Outputs, what each is made of in the order of the ranks, and the reduction; ``None`` for moves."""


@dataclass
class Step:
    """One operation as its members see it; ranks count within the group."""

    number: int
    group: ProcessGroup
    dtype: torch.dtype
    op: ReduceOp
    count: int
    layouts: tuple[str, str]
    root: int
    asynchronous: bool

    def __post_init__(self) -> None:
        self.me, self.size = self.group.rank(), self.group.size()
        self.about = {"group": self.group, "async_op": self.asynchronous}

    def of(self, rank: int, part: int = 0, count: int | None = None) -> torch.Tensor:
        return values(self.dtype, rank, self.count if count is None else count, 97 * self.number + part)

    def given(self, part: int = 0, count: int | None = None) -> torch.Tensor:
        return place(self.of(self.me, part, count), self.layouts[0]).tensor

    def blank(self, count: int | None = None) -> Placed:
        return place(self.of(self.size + 3, 90, count), self.layouts[1])

    def dense(self, count: int) -> Placed:
        return place(self.of(self.size + 3, 90, count), "dense")


def all_reduce(step: Step) -> tuple[Work | None, Expected]:
    mine = place(step.of(step.me), step.layouts[0])
    work = dist.all_reduce(mine.tensor, step.op, **step.about)
    return work, [(mine, [step.of(rank) for rank in range(step.size)], step.op)]


def reduce(step: Step) -> tuple[Work | None, Expected]:
    mine = place(step.of(step.me), step.layouts[0])
    work = dist.reduce(mine.tensor, op=step.op, group_dst=step.root, **step.about)
    inputs = [step.of(rank) for rank in range(step.size)]
    return work, [(mine, inputs, step.op)] if step.me == step.root else []


def reduce_scatter(step: Step) -> tuple[Work | None, Expected]:
    output = step.blank()
    work = dist.reduce_scatter(
        output.tensor, [step.given(r) for r in range(step.size)], step.op, **step.about
    )
    return work, [(output, [step.of(rank, step.me) for rank in range(step.size)], step.op)]


def reduce_scatter_tensor(step: Step) -> tuple[Work | None, Expected]:
    output, whole = step.blank(), step.count * step.size
    work = dist.reduce_scatter_tensor(output.tensor, step.of(step.me, 0, whole), step.op, **step.about)
    mine = slice(step.me * step.count, (step.me + 1) * step.count)
    return work, [(output, [step.of(rank, 0, whole)[mine] for rank in range(step.size)], step.op)]


def broadcast(step: Step) -> tuple[Work | None, Expected]:
    mine = place(step.of(step.me), step.layouts[0])
    work = dist.broadcast(mine.tensor, group_src=step.root, **step.about)
    return work, [(mine, [step.of(step.root)], None)]


def all_gather(step: Step) -> tuple[Work | None, Expected]:
    outputs = [step.blank() for _ in range(step.size)]
    work = dist.all_gather([output.tensor for output in outputs], step.given(), **step.about)
    return work, [(output, [step.of(rank)], None) for rank, output in enumerate(outputs)]


def all_gather_into_tensor(step: Step) -> tuple[Work | None, Expected]:
    output = step.dense(step.count * step.size)
    work = dist.all_gather_into_tensor(output.tensor, step.of(step.me), **step.about)
    return work, [(output, [step.of(rank) for rank in range(step.size)], None)]


def gather(step: Step) -> tuple[Work | None, Expected]:
    outputs = [step.blank() for _ in range(step.size)] if step.me == step.root else []
    tensors = [output.tensor for output in outputs] or None
    work = dist.gather(step.given(), tensors, group_dst=step.root, **step.about)
    return work, [(output, [step.of(rank)], None) for rank, output in enumerate(outputs)]


def scatter(step: Step) -> tuple[Work | None, Expected]:
    output = step.blank()
    parts = [step.given(rank) for rank in range(step.size)] if step.me == step.root else None
    work = dist.scatter(output.tensor, parts, group_src=step.root, **step.about)
    return work, [(output, [step.of(step.root, step.me)], None)]


def all_to_all(step: Step) -> tuple[Work | None, Expected]:
    outputs = [step.blank() for _ in range(step.size)]
    inputs = [step.given(rank) for rank in range(step.size)]
    work = dist.all_to_all([output.tensor for output in outputs], inputs, **step.about)
    return work, [(output, [step.of(rank, step.me)], None) for rank, output in enumerate(outputs)]


def all_to_all_single(step: Step) -> tuple[Work | None, Expected]:
    """Of uneven parts: rank ``r`` sends ``count + s`` elements to rank ``s``."""
    mine = [step.of(step.me, rank, step.count + rank) for rank in range(step.size)]
    output = step.dense((step.count + step.me) * step.size)
    work = dist.all_to_all_single(
        output.tensor,
        torch.cat(mine),
        [step.count + step.me] * step.size,
        [step.count + rank for rank in range(step.size)],
        **step.about,
    )
    return work, [(output, [step.of(rank, step.me, step.count + step.me) for rank in range(step.size)], None)]


def barrier(step: Step) -> tuple[Work | None, Expected]:
    return dist.barrier(**step.about), []


def message(step: Step) -> tuple[Work | None, Expected]:
    """From the root to the next rank."""
    receiver = (step.root + 1) % step.size
    if step.me == step.root != receiver:
        return dist.isend(step.given(), group=step.group, tag=step.number, group_dst=receiver), []
    if step.me != receiver or step.root == receiver:
        return None, []
    output = step.blank()
    work = dist.irecv(output.tensor, group=step.group, tag=step.number, group_src=step.root)
    return work, [(output, [step.of(step.root)], None)]


OPERATIONS: dict[str, Callable[[Step], tuple[Work | None, Expected]]] = {
    function.__name__: function
    for function in (
        all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, broadcast, all_gather,
        all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single, barrier,
    )
} | {"send": message}  # fmt: skip


class Program:
    """A program, as one rank runs it."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.dice = random.Random(seed)  # what is issued, the same on all ranks
        self.own_dice = random.Random(f"{seed} {rank}")  # when this rank waits
        world = dist.group.WORLD
        subsets = [sorted(self.dice.sample(range(size), self.dice.randint(2, size))) for _ in range(2)]
        self.groups = [world, *(dist.new_group(ranks) for ranks in subsets)]
        self.report = Report(world)
        self.pending: list[tuple[str, Work | None, Expected]] = []

    def run(self, steps: int) -> None:
        for number in range(steps):
            self.step(number)
            while self.pending and self.own_dice.random() < 0.4:
                self.finish_one()
        while self.pending:
            self.finish_one()
        self.report.finish(steps // 4)

    def step(self, number: int) -> None:
        dice = self.dice
        group, name = dice.choice(self.groups), dice.choice(list(OPERATIONS))
        dtype, op, count = dice.choice(DTYPES), dice.choice(OPS), dice.choice(COUNTS)
        layouts = dice.choice(LAYOUTS), dice.choice(LAYOUTS)
        root, asynchronous = dice.randrange(12), dice.random() < 0.6
        if not isinstance(group, ProcessGroup):
            return  # this rank is no member
        about = {"op": op} if "reduce" in name else {}
        if name != "barrier" and not group.supports(name, device="cpu", dtype=dtype, **about):
            return
        step = Step(number, group, dtype, op, count, layouts, root % group.size(), asynchronous)
        case = f"step {number}, {name} {dtype} {op.name} {count} {layouts} on {group.describe()}"

        def issue() -> None:
            work, expected = OPERATIONS[name](step)
            self.pending.append((case, work, expected))

        self.report.run(case, issue)

    def finish_one(self) -> None:
        """Waits for any operation under way, and compares what it gave."""
        case, work, expected = self.pending.pop(self.own_dice.randrange(len(self.pending)))
        if work is not None:
            self.report.run(f"{case}, waited for", work.wait)
        for output, inputs, op in expected:
            if op is None:
                self.report.same(case, output.tensor, torch.cat(inputs))
            else:
                self.report.reduced(case, output.tensor, inputs, op)
            self.report.whole(case, output)


def random_program(rank: int, size: int, seed: int) -> None:
    try:
        Program(seed, rank, size).run(STEPS)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("backend", ["host", "round_robin", "gloo"])
def test_random_programs(backend: str, size: int, request: pytest.FixtureRequest) -> None:
    run_world(random_program, size, request.config.getoption("seed"), backend=backend, timeout=120)
