"""Ranks that issue different collectives: every pair of them, on every rank the table, nowhere an output."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from harness import run_ranks

from collectives import CollectiveMismatchError, ProcessGroup, ReduceOp, Work
from collectives.core.types import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    make_premul_sum,
)

F32, I32, BF16 = torch.float32, torch.int32, torch.bfloat16
SUM, MAX, AVG = ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG
PLACEMENTS = ["aa", "ab", *(pytest.param(name, marks=pytest.mark.full) for name in ("aaa", "aab", "abc"))]
"""A letter for the machine of each rank."""

MARK = 7
LONG = 200_003
"""Elements of a message that goes in chunks."""


@dataclass
class Call:
    """A collective as one rank issues it.

    Attributes:
        shown: how the table must name it.
        differs: what else tells it from calls that are shown alike, such as a factor.
        outputs: tensors that must stay as they are.
        issue: issues it.
    """

    shown: str
    differs: object
    outputs: list[torch.Tensor]
    issue: Callable[[], Work]


def marked(count: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.full((count,), MARK, dtype=dtype)


def name(dtype: torch.dtype, count: int) -> str:
    return f"{str(dtype).removeprefix('torch.')}, {count} elements"


class Calls:
    """The collectives that the test pairs, as this rank issues them."""

    def __init__(self, group: ProcessGroup, asynchronous: bool) -> None:
        self.group = group
        self.me, self.size = group.rank(), group.size()
        self.asynchronous = asynchronous
        self.found: list[Call] = []

    def add(
        self, shown: str, issue: Callable[[], Work], *outputs: torch.Tensor, differs: object = None
    ) -> None:
        self.found.append(Call(shown, differs, list(outputs), issue))

    def all_reduce(self, count: int, dtype: torch.dtype = F32, op: ReduceOp = SUM) -> None:
        data = marked(count, dtype)
        options = AllreduceOptions(reduceOp=op, asyncOp=self.asynchronous)
        shown = f"all_reduce({op.name}, {name(dtype, count)})"
        self.add(shown, lambda: self.group.allreduce([data], options), data, differs=op.factor)

    def reduce(self, count: int, root: int, dtype: torch.dtype = F32, op: ReduceOp = SUM) -> None:
        data = marked(count, dtype)
        options = ReduceOptions(reduceOp=op, rootRank=root, asyncOp=self.asynchronous)
        shown = f"reduce({op.name}, {name(dtype, count)}, root {root})"
        self.add(shown, lambda: self.group.reduce([data], options), data)

    def broadcast(self, count: int, root: int, dtype: torch.dtype = F32) -> None:
        data = marked(count, dtype)
        options = BroadcastOptions(rootRank=root, asyncOp=self.asynchronous)
        self.add(
            f"broadcast({name(dtype, count)}, root {root})",
            lambda: self.group.broadcast([data], options),
            data,
        )

    def all_gather(self, count: int, dtype: torch.dtype = F32) -> None:
        outputs = [marked(count, dtype) for _ in range(self.size)]
        sent, options = marked(count, dtype), AllgatherOptions(asyncOp=self.asynchronous)
        shown = f"all_gather({name(dtype, count)})"
        self.add(shown, lambda: self.group.allgather([outputs], [sent], options), *outputs)

    def all_gather_uneven(self) -> None:
        """The parts of another rank differ; its own is as long as in ``all_gather(4)``."""
        outputs = [marked(4 if rank == self.me else 6) for rank in range(self.size)]
        sent, options = marked(4), AllgatherOptions(asyncOp=self.asynchronous)
        shown = "all_gather(float32, 4 elements)"
        self.add(shown, lambda: self.group.allgather([outputs], [sent], options), *outputs, differs="uneven")

    def reduce_scatter(self, count: int, dtype: torch.dtype = F32, op: ReduceOp = SUM) -> None:
        output, sent = marked(count, dtype), marked(count * self.size, dtype)
        options = ReduceScatterOptions(reduceOp=op, asyncOp=self.asynchronous)
        shown = f"reduce_scatter({op.name}, {name(dtype, count * self.size)})"
        self.add(
            shown, lambda: self.group.reduce_scatter_single(output, sent, options), output, differs=op.factor
        )

    def gather(self, count: int, root: int, dtype: torch.dtype = F32) -> None:
        outputs = [marked(count, dtype) for _ in range(self.size)] if self.me == root else None
        sent, options = marked(count, dtype), GatherOptions(rootRank=root, asyncOp=self.asynchronous)
        lists = [] if outputs is None else [outputs]
        shown = f"gather({name(dtype, count)}, root {root})"
        self.add(shown, lambda: self.group.gather(lists, [sent], options), *(outputs or ()))

    def scatter(self, count: int, root: int, dtype: torch.dtype = F32) -> None:
        output, options = marked(count, dtype), ScatterOptions(rootRank=root, asyncOp=self.asynchronous)
        lists = [[marked(count, dtype) for _ in range(self.size)]] if self.me == root else []
        shown = f"scatter({name(dtype, count)}, root {root})"
        self.add(shown, lambda: self.group.scatter([output], lists, options), output)

    def all_to_all(self, count: int, dtype: torch.dtype = F32) -> None:
        output, sent = marked(count * self.size, dtype), marked(count * self.size, dtype)
        options = AllToAllOptions(asyncOp=self.asynchronous)
        shown = f"all_to_all({name(dtype, count * self.size)})"
        self.add(shown, lambda: self.group.alltoall_base(output, sent, None, None, options), output)

    def every(self) -> list[Call]:
        """Returns collectives that differ in pairs, in at least one of all that ranks must agree on."""
        for count in (4, 5, LONG):
            self.all_reduce(count)
            self.reduce(count, 0)
            self.broadcast(count, 0)
            self.all_gather(count)
            self.reduce_scatter(count)
            self.gather(count, 0)
            self.scatter(count, 0)
            self.all_to_all(count)
        for dtype in (I32, BF16):  # one as wide as float32, one half as wide with the bytes of 4 float32
            count = 4 * F32.itemsize // dtype.itemsize
            self.all_reduce(count, dtype)
            self.reduce(count, 0, dtype)
            self.broadcast(count, 0, dtype)
            self.all_gather(count, dtype)
            self.reduce_scatter(count, dtype)
            self.gather(count, 0, dtype)
            self.scatter(count, 0, dtype)
            self.all_to_all(count, dtype)
        for op in (MAX, AVG, make_premul_sum(2.0), make_premul_sum(3.0)):
            self.all_reduce(4, F32, op)
            self.reduce_scatter(4, F32, op)
        self.reduce(4, 0, F32, MAX)
        for rooted in (self.reduce, self.broadcast, self.gather, self.scatter):
            rooted(4, 1)
        self.all_gather_uneven()
        self.add("barrier", lambda: self.group.barrier(BarrierOptions(asyncOp=self.asynchronous)))
        return self.found


def disagree(group: ProcessGroup, asynchronous: bool) -> int:
    """Issues every pair of different collectives, one on the last rank, the other on all before it."""
    me, size = group.rank(), group.size()
    every, pairs = Calls(group, asynchronous).every(), 0
    alive = torch.ones(3)
    for first, second in itertools.permutations(every, 2):
        if (first.shown, first.differs) == (second.shown, second.differs):
            raise AssertionError(f"the test has {first.shown} twice")
        mine = second if me == size - 1 else first
        case = f"{first.shown} {first.differs} against {second.shown} {second.differs}"
        with pytest.raises(CollectiveMismatchError) as caught:
            mine.issue().wait()
        text, named = re.subn(r"(rank \d) on '[^']+'", r"\1", str(caught.value))
        assert named in {0, size}, text  # between machines it names them
        if first.shown == second.shown:
            differs = {first.differs, second.differs}
            assert ("other part sizes" if "uneven" in differs else "another factor") in text
        assert f"[rank {me}] " in text, f"{case}: {text}"
        for rank in range(size):
            shown = (second if rank == size - 1 else first).shown
            assert f"\n  rank {rank}: {shown}" in text, f"{case}: no line {shown!r} of rank {rank} in: {text}"
        for output in mine.outputs:
            assert bool((output == MARK).all()), f"{case}: an output was written"
        pairs += 1
        if pairs % 16 == 0:
            group.allreduce(alive.fill_(1.0)).wait()
            assert alive.tolist() == [size] * 3, case
    return pairs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_pair_of_collectives(placement: str, asynchronous: bool) -> None:
    pairs = run_ranks(disagree, len(placement), asynchronous, backend="host", placement=placement)
    assert min(pairs) > 2000


def exchange_other_sizes(group: ProcessGroup) -> None:
    """What the last rank expects of rank 0 is not what that sends, which shows when all have told."""
    me, last = group.rank(), group.size() - 1
    sent = [torch.ones(3) for _ in range(last + 1)]
    received = [marked(3 + (me == last and rank == 0)) for rank in range(last + 1)]
    with pytest.raises(CollectiveMismatchError, match=f"0 sends 12 bytes to rank {last}, which expects 16"):
        group.alltoall(received, sent).wait()
    assert all(bool((part == MARK).all()) for part in received)
    group.alltoall(received, sent if me else [torch.ones(3)] * last + [torch.ones(4)]).wait()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sizes_that_do_not_fit(placement: str) -> None:
    run_ranks(exchange_other_sizes, len(placement), backend="host", placement=placement)


def out_of_order(group: ProcessGroup) -> None:
    """One rank swaps two of its operations in flight; those around them are done."""
    me, size = group.rank(), group.size()
    tensors = [torch.ones(100) for _ in range(6)]
    order = [0, 1, 3, 2, 4, 5] if me == size - 1 else [0, 1, 2, 3, 4, 5]
    ops = [SUM, SUM, SUM, MAX, SUM, SUM]
    works = [group.allreduce([tensors[n]], AllreduceOptions(reduceOp=ops[n])) for n in order]
    for place, (n, work) in enumerate(zip(order, works, strict=True)):
        if place in (2, 3):
            with pytest.raises(CollectiveMismatchError, match=f"collective number {place + 1}:"):
                work.wait()
            assert bool((tensors[n] == 1).all())
        else:
            work.wait()
            assert bool((tensors[n] == size).all())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_operations_in_flight_in_another_order(placement: str) -> None:
    run_ranks(out_of_order, len(placement), backend="host", placement=placement)
