"""How a reduction is issued, and where its elements lie, changes no bit of its result: a sampled property.

The expected bits know of neither: elements are combined one by one in rank order in the wide type, and
rounded once (:func:`conformance.oracle.reduced`); between machines, machine by machine.

The drawn numbers lie within nine binary orders of magnitude, so that sums depend on order and roundings.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from dataclasses import dataclass

import pytest
import torch
from conformance.oracle import FLOATS, PARTS, raw, reduced, same
from harness import run_ranks

from collectives import ProcessGroup, ReduceOp, Work, _native
from collectives.backends.round_robin import RoundRobinOptions
from collectives.core.types import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOptions,
    ReduceScatterOptions,
    make_premul_sum,
)

SEED = 20261120
DTYPES = (*FLOATS, *PARTS, torch.int32, torch.uint8)
OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
CASES = 150
DTYPES_BETWEEN_MACHINES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
CASES_BETWEEN_MACHINES = 60
Machines = list[list[int]]
_PERIOD = 2 * 10007
_LONGEST_BYTES = 2_000_000


@dataclass(frozen=True)
class Case:
    """A reduction drawn from a seed, and how it is issued.

    Attributes:
        number: its number under the seed.
        operation: one of :data:`OPERATIONS`.
        dtype: data type.
        op: reduction.
        count: number of elements.
        cuts: the ends of the pieces of the elements; a piece is an operation of its own.
        shift: bytes between the alignment that torch gives and the pieces.
        mode: ``"in turn"``, ``"in flight"`` (all pieces are issued before any is waited for),
            ``"coalesced"``, or ``"strided"`` (in flight, from memory with gaps).
        root: root of a reduce.
        late: ranks that come late.
    """

    number: int
    operation: str
    dtype: torch.dtype
    op: ReduceOp
    count: int
    cuts: tuple[int, ...]
    shift: int
    mode: str
    root: int
    late: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"case {self.number} of seed {SEED}: {self.operation}({self.op.name}, {self.dtype}, {self.count} "
            f"elements) in {len(self.cuts)} pieces up to {self.cuts}, {self.shift} bytes off, {self.mode}, "
            f"root {self.root}, late {self.late}"
        )


def draw(number: int, group: ProcessGroup, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    """Returns a case, the same on every rank."""
    size = group.size()
    dice = random.Random(f"{SEED} {number} {size}")
    dtype = dice.choice(dtypes)
    ops = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVG, make_premul_sum(0.3), ReduceOp.PRODUCT, ReduceOp.MIN]
    op = dice.choice([op for op in ops if group.supports("all_reduce", dtype=dtype, op=op)])
    # All magnitudes alike, up to where a message takes several rounds of the staging memory.
    longest = _LONGEST_BYTES // dtype.itemsize
    count = min(int(2 ** dice.uniform(0, longest.bit_length())), longest)
    pieces = dice.choice([1, 1, 2, 3, 7])
    cuts = (*sorted(dice.randrange(count + 1) for _ in range(pieces - 1)), count)
    mode = dice.choice(["in turn", "in flight", "coalesced", "strided"])
    late = tuple(rank for rank in range(size) if dice.random() < 0.15)
    # The alignment that torch gives, every other that an element allows, and one that it does not.
    shift = dice.choice([0, dtype.itemsize, 3 * dtype.itemsize, 24, 1])
    operation = dice.choice(OPERATIONS)
    return Case(number, operation, dtype, op, count, cuts, shift, mode, dice.randrange(size), late)


@functools.lru_cache(maxsize=64)
def period(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Returns the bytes of the numbers of a rank, which recur at a distance that no chunk or slice has."""
    if dtype in PARTS:
        return period(PARTS[dtype], rank)
    generator = torch.Generator().manual_seed(1000 * rank + 7)
    if dtype not in FLOATS or dtype is torch.float8_e8m0fnu:
        size = (_PERIOD * dtype.itemsize,)
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    scale = torch.pow(2.0, torch.randint(-4, 5, (_PERIOD,), generator=generator).to(torch.float64))
    numbers = torch.randn(_PERIOD, generator=generator, dtype=torch.float64) * scale
    return numbers.to(torch.float32).to(dtype).view(torch.uint8)


def window(case: Case, rank: int, count: int, salt: int = 0) -> torch.Tensor:
    """Returns the numbers that a rank gives to a piece of a case."""
    numbers, width = period(case.dtype, rank), case.dtype.itemsize
    begin = (case.number * 7919 + salt * 104729) % 1000 * width
    repeats = -(-(begin + count * width) // numbers.numel())
    return numbers.repeat(repeats)[begin : begin + count * width].clone().view(case.dtype)


def lay(values: torch.Tensor, case: Case) -> torch.Tensor:
    """Returns a copy of flat values in memory as the case has it."""
    count, width = values.numel(), values.element_size()
    if case.mode == "strided":
        spread = torch.empty(2 * count * width, dtype=torch.uint8).view(values.dtype)[::2]
        return spread.copy_(values)
    memory = bytearray(case.shift + count * width + 1)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole[case.shift : case.shift + count * width] = values.view(torch.uint8)
    if count == 0:
        return whole[:0].view(values.dtype)
    return torch.frombuffer(memory, dtype=values.dtype, count=count, offset=case.shift)


def settle(works: list[Work], case: Case) -> None:
    if case.number % 2:
        works.reverse()
    for work in works:
        work.wait()


def issue(group: ProcessGroup, case: Case, pieces: list[torch.Tensor]) -> None:
    """Reduces the pieces in place."""
    if case.operation == "reduce":
        options = ReduceOptions(reduceOp=case.op, rootRank=case.root, asyncOp=case.mode != "in turn")
        settle([group.reduce([piece], options) for piece in pieces], case)
    elif case.mode == "coalesced":
        group.allreduce_coalesced(pieces, AllreduceCoalescedOptions(reduceOp=case.op)).wait()
    else:
        options = AllreduceOptions(reduceOp=case.op, asyncOp=case.mode == "in flight")
        settle([group.allreduce([piece], options) for piece in pieces], case)


def check_in_place(group: ProcessGroup, case: Case, machines: Machines) -> str | None:
    me, size = group.rank(), group.size()
    inputs = [window(case, rank, case.count) for rank in range(size)]
    begins = (0, *case.cuts[:-1])
    pieces = [lay(inputs[me][b:e], case) for b, e in zip(begins, case.cuts, strict=True)]
    issue(group, case, pieces)
    alike = case.operation == "all_reduce" or me == case.root
    expected = reduced(inputs, case.op, machines) if alike else inputs[me]
    return same(torch.cat([raw(piece) for piece in pieces]).view(case.dtype), expected)


def check_scattered(group: ProcessGroup, case: Case, machines: Machines) -> str | None:
    """Every piece of the case is an operation of its own, whose part r goes to rank r."""
    me, size = group.rank(), group.size()
    options = ReduceScatterOptions(reduceOp=case.op, asyncOp=case.mode != "in turn")
    works: list[Work] = []
    outputs, expected = [], []
    begins = (0, *case.cuts[:-1])
    for salt, (begin, end) in enumerate(zip(begins, case.cuts, strict=True)):
        lengths = [(end - begin) // size] * size
        if case.operation == "reduce_scatter":  # whose parts need not be alike
            lengths = [length + (salt + rank) % 2 for rank, length in enumerate(lengths)]
        ends = list(itertools.accumulate(lengths))
        inputs = [window(case, rank, ends[-1], salt) for rank in range(size)]
        mine, own = lay(inputs[me], case), slice(ends[me] - lengths[me], ends[me])
        output = lay(torch.zeros_like(inputs[me][own]), case)
        if case.operation == "reduce_scatter":
            works.append(group.reduce_scatter([output], [list(mine.split(lengths))], options))
        else:
            works.append(group.reduce_scatter_single(output, mine, options))
        outputs.append(output)
        expected.append(raw(reduced([tensor[own] for tensor in inputs], case.op, machines)))
    settle(works, case)
    return same(torch.cat([raw(o) for o in outputs]).view(case.dtype), torch.cat(expected).view(case.dtype))


def run_cases(group: ProcessGroup, numbers: range, placement: str = "") -> int:
    # In the order of their lowest ranks.
    machines = [[r for r, its in enumerate(placement) if its == one] for one in dict.fromkeys(placement)]
    for number in numbers:
        case = draw(number, group, DTYPES_BETWEEN_MACHINES if machines else DTYPES)
        if group.rank() in case.late:
            time.sleep(0.003)
        check = check_in_place if case.operation in {"all_reduce", "reduce"} else check_scattered
        try:
            difference = check(group, case, machines)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        assert difference is None, f"{case}: {difference}"
    return len(numbers)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lanes", [1, 3])
def test_how_it_is_issued_changes_no_bit(size: int, lanes: int) -> None:
    # Lanes take other cases, so that both together see more.
    numbers = range(100 * lanes, 100 * lanes + CASES)
    backend = "host" if lanes == 1 else "round_robin"
    options = {} if lanes == 1 else {"pg_options": RoundRobinOptions(lanes, "host")}
    assert run_ranks(run_cases, size, numbers, backend=backend, **options) == [CASES] * size


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["ab", "aab", "abab", "aabb"])
def test_how_it_is_issued_changes_no_bit_between_machines(placement: str) -> None:
    numbers = range(1000, 1000 + CASES_BETWEEN_MACHINES)
    ran = run_ranks(run_cases, len(placement), numbers, placement, backend="host", placement=placement)
    assert ran == [CASES_BETWEEN_MACHINES] * len(placement)


@pytest.mark.parametrize("instructions", ["default", "avx2"])
def test_instruction_sets_change_no_bit(instructions: str) -> None:
    """The sets below the best one, which all other tests run with."""
    sets = ["default", "avx2", "avx512"]
    if _native.cpu_capability() not in sets[sets.index(instructions) + 1 :]:
        pytest.skip(f"this CPU's best instruction set is {_native.cpu_capability()!r}")
    env = {"COLLECTIVES_CPU_CAPABILITY": instructions}
    ran = run_ranks(run_cases_with, 2, range(500, 525), instructions, backend="host", env=env, isolated=True)
    assert ran == [25] * 2


def run_cases_with(group: ProcessGroup, numbers: range, instructions: str) -> int:
    assert _native.cpu_capability() == instructions
    return run_cases(group, numbers)
