"""Every collective gives the right values: each data type, reduction, count, layout, root, uneven parts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from conformance.oracle import FLOATS, PREMUL, Report, digest, values
from conformance.table import BY_NAME, by_functions, by_group, cases, few_cases, run
from harness import run_ranks, run_world
from torch_world import run_torch

import collectives
from collectives import ProcessGroup, ReduceOp
from collectives.core.operations import ALL_REDUCE_INTO_TENSOR

NAMES = [name for name in BY_NAME if name != "barrier"]
LAYOUTS = ("ab", "abc", "aabb", "abbb", "abab")
"""Placements of ranks on machines; a letter is a machine."""


def right_values(
    group: ProcessGroup,
    name: str,
    kind: type[Report] = Report,
    placement: str = "",
    device: str = "cpu",
    every: int = 1,
) -> list[str]:
    """Runs all cases of a collective, or a part; returns digests of what all ranks must have alike."""
    report, issue, me = kind(group), by_group(group), group.rank()
    machines = [[r for r, its in enumerate(placement) if its == one] for one in dict.fromkeys(placement)]
    some = itertools.islice(cases(group, BY_NAME[name], device), None, None, every)
    outputs = [run(report, case, issue, me, machines, device) for case in some]
    report.finish(40 // every)
    return [digest(one) for some in outputs for one in some] if name == "all_reduce" else []


@pytest.mark.parametrize("name", NAMES)
def test_right_values(backend: str, world_size: int, name: str) -> None:
    """All cases on three ranks, else every third: an odd number, for calls of both manners."""
    every = 1 if world_size == 3 else 3
    found = run_ranks(right_values, world_size, name, Report, "", "cpu", every, backend=backend)
    assert all(digests == found[0] for digests in found), "the ranks' results differ in their bits"


def between_machines(name: str, placement: str, **options: Any) -> None:
    arguments = (right_values, len(placement), name, Report, placement, "cpu", 3)
    run_ranks(*arguments, backend="host", placement=placement, timeout=110, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("placement", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_right_values_between_machines(name: str, placement: str) -> None:
    between_machines(name, placement)


def test_streams_of_several_sockets_carry_the_same_bits() -> None:
    for name in ("all_reduce", "reduce_scatter_tensor"):
        between_machines(name, "abc", env={"COLLECTIVES_HOST_STREAMS": "3"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_right_values_by_several_threads_of_a_rank(name: str) -> None:
    run_ranks(right_values, 3, name, Report, "", "cpu", 3, backend="host", pg_options={"threads": 4})


def functions(rank: int, size: int, of_torch: bool) -> None:
    """Both front ends, by all names of a function, at once and later."""
    dist = torch_dist if of_torch else collectives
    world = dist.group.WORLD
    group = world.inner if of_torch else world
    report = Report(group)
    for name in NAMES:
        if of_torch and not BY_NAME[name].methods:  # torch has none
            continue
        for case in few_cases(group, BY_NAME[name]):
            for other_names in (False, True):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # all_reduce_coalesced is to go
                    run(report, case, by_functions(dist, other_names), rank, [])
    report.finish(100)


def test_functions(backend: str) -> None:
    run_world(functions, 3, False, backend=backend)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["collectives", "collectives_gloo", "collectives_round_robin"])
def test_functions_of_torch(backend: str, size: int) -> None:
    run_torch(functions, size, True, backend=backend)


def reductions_of(
    report: Report, group: ProcessGroup, rows: Iterable[tuple[ReduceOp, list[torch.Tensor]]]
) -> None:
    """All-reduces tensors of which even ranks give the first, odd ones the second."""
    for op, pair in rows:
        inputs = [pair[rank % 2] for rank in range(group.size())]
        mine = inputs[group.rank()].clone()
        case = f"{mine.dtype} {op.name} of {mine.numel()}"
        report.run(case, lambda mine=mine, op=op: group.allreduce(mine, op).wait())
        report.reduced(case, mine, inputs, op)


def special_values(group: ProcessGroup, kind: type[Report] = Report) -> None:
    report, nan, inf = kind(group), float("nan"), float("inf")
    rows = torch.tensor([[0.0, nan, inf, 1.0, -inf, inf], [1.0, 1.0, 1.0, nan, inf, -inf]])
    # Gloo may lose a NaN in MIN and MAX, as its docstring says.
    ops = [ReduceOp.SUM, ReduceOp.AVG, *((ReduceOp.MIN, ReduceOp.MAX) if report.exact else ())]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        reductions_of(report, group, [(op, list(rows.to(dtype))) for op in ops])
    report.finish(8)


def extremes(group: ProcessGroup) -> None:
    """A mean that the type holds does not overflow on the way; MIN and MAX keep the first rank's zero."""
    report = Report(group)
    for dtype in FLOATS:
        largest = float(torch.finfo(dtype).max)
        for op, rows in (
            (ReduceOp.AVG, [[largest, -largest, largest], [largest, -largest, 0.0]]),
            (ReduceOp.MIN, [[0.0, -0.0, 1.0], [-0.0, 0.0, -0.0]]),
            (ReduceOp.MAX, [[0.0, -0.0, -1.0], [-0.0, 0.0, 0.0]]),
        ):
            wide = [torch.tensor(row, dtype=torch.float64).to(dtype).repeat(13) for row in rows]
            if group.supports("all_reduce", dtype=dtype, op=op):
                reductions_of(report, group, [(op, [row[:count] for row in wide]) for count in (1, 39)])
    report.finish(8)


def bits_of_one_sum(group: ProcessGroup) -> None:
    """A sum's bits depend on its addends, not on operation, size of the message or place in it."""
    report, me, size = Report(group), group.rank(), group.size()
    for dtype in FLOATS:
        for op in (ReduceOp.SUM, ReduceOp.AVG, PREMUL):
            if not group.supports("all_reduce", dtype=dtype, op=op):
                continue
            mine = values(dtype, me, 37, salt=5)
            alone = mine.clone()
            group.allreduce(alone, op).wait()
            for count in (1, 2, 4099):
                case = f"{dtype} {op.name} {count} copies"
                copies = mine.view(torch.uint8).repeat(count).view(dtype)
                report.run(case, lambda copies=copies, op=op: group.allreduce(copies, op).wait())
                report.same(case, copies, alone.view(torch.uint8).repeat(count).view(dtype))
            rooted, part = mine.clone(), torch.empty_like(mine)
            report.run("reduce", lambda r=rooted, op=op: group.reduce(r, root=0, op=op).wait())
            report.same(f"{dtype} {op.name} reduce", rooted, mine if me else alone)
            parts = [mine] * size
            report.run("scatter", lambda p=part, g=parts, op=op: group.reduce_scatter(p, g, op).wait())
            report.same(f"{dtype} {op.name} reduce_scatter", part, alone)
    report.finish(50)


def rows_and_stacks(group: ProcessGroup) -> None:
    """Single tensors may be stacks with a row for each rank; splits count rows, not elements."""
    me, size = group.rank(), group.size()
    stacks = [values(torch.float32, rank, 6 * size, salt=4).view(size, 2, 3) for rank in range(size)]
    gathered, part = torch.empty(size, 2, 3), torch.empty(2, 3)
    group.all_gather_single(gathered, stacks[me][0]).wait()
    assert torch.equal(gathered, torch.stack([stack[0] for stack in stacks]))
    group.reduce_scatter_single(part, stacks[me].clone(), ReduceOp.MAX).wait()
    assert torch.equal(part, torch.stack(stacks)[:, me].amax(0))
    # To rank 0 go two rows, to the others one.
    rows = [values(torch.float32, rank, 3 * (size + 1)).view(size + 1, 3) for rank in range(size)]
    received = [2 if me == 0 else 1] * size
    output = torch.empty(sum(received), 3)
    group.alltoall_base(output, rows[me], received, [2, *[1] * (size - 1)]).wait()
    start = 0 if me == 0 else me + 1
    assert torch.equal(output, torch.cat([row[start : start + received[0]] for row in rows]))
    shapes = [torch.empty(rank + 1, 2) for rank in range(size)]
    group.allgather(shapes, torch.full((me + 1, 2), float(me))).wait()
    assert [shape.unique().tolist() for shape in shapes] == [[rank] for rank in range(size)]


def other_tensors(group: ProcessGroup) -> None:
    """Kinds of tensors whose memory does not hold their values plainly, and those that autograd watches."""
    report, me, size = Report(group), group.rank(), group.size()
    expected = [values(torch.complex64, rank, 9) for rank in range(size)]
    lazy, outputs = torch.conj(expected[me]), [torch.empty(9, dtype=torch.complex64) for _ in range(size)]
    report.run("conjugate", lambda: group.allgather(outputs, lazy).wait())
    for rank in range(size):
        report.same(f"conjugate {rank}", outputs[rank], torch.conj(expected[rank]).resolve_conj())
    target = torch.conj(torch.zeros(9, dtype=torch.complex64))
    if me == 0:
        target.copy_(expected[0])
    report.run("into conjugate", lambda: group.broadcast(target, root=0).wait())
    report.same("into conjugate", target.resolve_conj(), expected[0])
    negative = torch._neg_view(values(torch.float32, me, 5))
    report.run("negative", lambda: group.broadcast(negative, root=0).wait())
    report.same("negative", negative.resolve_neg(), -values(torch.float32, 0, 5))

    leaf = values(torch.float32, me, 5).requires_grad_()
    report.run("leaf", lambda: group.broadcast(leaf, root=size - 1).wait())
    report.same("leaf", leaf, values(torch.float32, size - 1, 5))
    assert leaf.requires_grad
    assert leaf.grad_fn is None

    expanded = torch.full((1,), float(me)).expand(6)
    outputs = [torch.empty(6) for _ in range(size)]
    report.run("expanded", lambda: group.allgather(outputs, expanded).wait())
    for rank in range(size):
        report.same(f"expanded {rank}", outputs[rank], torch.full((6,), float(rank)))

    last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    last.copy_(values(torch.float32, me, 120).view(2, 3, 4, 5))
    report.run("channels last", lambda: group.broadcast(last, root=0).wait())
    report.same("channels last", last, values(torch.float32, 0, 120).view(2, 3, 4, 5))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in (torch.quint8, torch.qint8, torch.qint32):
            quantized = [torch.quantize_per_tensor(torch.arange(5.0) + r, 0.5, 3, kind) for r in range(size)]
            report.run(f"{kind}", lambda m=quantized[me]: group.broadcast(m, root=0).wait())
            report.same(f"{kind}", quantized[me].int_repr(), quantized[0].int_repr())
            with pytest.raises(NotImplementedError, match="cannot be reduced"):
                group.allreduce(quantized[me])
    report.finish(8)


def views_of_the_same_memory(group: ProcessGroup) -> None:
    """Outputs that are views of inputs are summed right, or refused where they overlap in part."""
    size, square = group.size(), torch.arange(9.0).view(3, 3)
    for output, view in ((lambda x: x, torch.t), (torch.t, lambda x: x), (torch.t, torch.t)):
        tensor = square.clone()
        group.call(ALL_REDUCE_INTO_TENSOR, output(tensor), view(tensor), op=ReduceOp.SUM).wait()
        assert output(tensor).equal(size * view(square))
    complex_ = torch.complex(square, square)
    group.call(ALL_REDUCE_INTO_TENSOR, mine := complex_.clone(), mine.conj(), op=ReduceOp.SUM).wait()
    assert mine.equal(size * complex_.conj().resolve_conj())
    for first, second in ((slice(1, None), slice(-1)), (slice(-1), slice(1, None))):
        tensor = torch.ones(5)
        with pytest.raises(ValueError, match="share memory"):
            group.call(ALL_REDUCE_INTO_TENSOR, tensor[first], tensor[second], op=ReduceOp.SUM)
    tensor = torch.ones(8)
    group.call(ALL_REDUCE_INTO_TENSOR, tensor[4:], tensor[:4], op=ReduceOp.SUM).wait()
    assert tensor.tolist() == [1] * 4 + [size] * 4


EXACT = [extremes, bits_of_one_sum]
BODIES = [special_values, *EXACT, rows_and_stacks, other_tensors, views_of_the_same_memory]


@pytest.mark.parametrize("body", BODIES)
def test_special_values(backend: str, world_size: int, body: Callable[[ProcessGroup], None]) -> None:
    if backend == "gloo" and body in EXACT:
        pytest.skip("Gloo promises neither, as its docstring says")
    run_ranks(body, world_size, backend=backend)
