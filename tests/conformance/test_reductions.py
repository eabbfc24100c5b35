"""all_reduce, reduce and both forms of reduce_scatter: every data type, reduction, count, layout and root."""

from __future__ import annotations

import pytest
import torch
from conformance.oracle import DTYPES, FLOATS, OPS, PREMUL, Report, digest, place, reduced, values
from harness import run_ranks

from collectives import ProcessGroup, ReduceOp
from collectives.core.types import AllreduceOptions, ReduceOptions, ReduceScatterOptions

COUNTS = (0, 1, 7, 1009)
LARGE = 300_007


def sparse(group: ProcessGroup) -> bool:
    """Whether to take one reduction of each data type, in turn, instead of all.

    Gloo needs milliseconds for each, as NCCL's double does. What they do with a data type is the same for any
    number of ranks, and two ranks see all of it.
    """
    return group.name() in {"gloo", "nccl"} and group.size() > 2


def offered(group: ProcessGroup, operation: str):
    """Yields the data types and reductions of the group: all that a data type can have must be there."""
    for turn, dtype in enumerate(DTYPES):
        ops = [op for op in OPS if group.supports(operation, device="cpu", dtype=dtype, op=op)]
        for op in ops[turn % len(ops) :][:1] if sparse(group) and ops else ops:
            yield dtype, op


def all_reduce_cases(group: ProcessGroup):
    for dtype, op in offered(group, "all_reduce"):
        for count in COUNTS:
            yield dtype, op, count, "dense"
        yield dtype, op, 1, "scalar"
        yield dtype, op, 65, "strided"
        yield dtype, op, 60, "transposed"
        yield dtype, op, 131, "offset"
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        yield dtype, ReduceOp.SUM, LARGE, "dense"
    yield torch.float16, ReduceOp.AVG, LARGE, "offset"
    yield torch.int32, ReduceOp.MAX, LARGE, "strided"


def all_reduce(group: ProcessGroup) -> str:
    report, digests = Report(group), []
    for turn, (dtype, op, count, layout) in enumerate(all_reduce_cases(group)):
        case = f"{dtype} {op.name} {count} {layout}"
        inputs = [values(dtype, rank, count) for rank in range(group.size())]
        mine = place(inputs[group.rank()], layout)
        options = AllreduceOptions(reduceOp=op, asyncOp=turn % 2 == 0)
        report.run(case, lambda mine=mine, options=options: group.allreduce([mine.tensor], options).wait())
        report.reduced(case, mine.tensor, inputs, op)
        report.whole(case, mine)
        digests.append(digest(mine.tensor))
    report.finish(120 if sparse(group) else 600)
    return " ".join(digests)


def test_all_reduce(backend: str, world_size: int) -> None:
    digests = run_ranks(all_reduce, world_size, backend=backend)
    assert len(set(digests)) == 1, "the ranks' results differ in their bits"


def special_values(group: ProcessGroup) -> None:
    report = Report(group)
    rows = torch.tensor(
        [[0.0, float("nan"), float("inf"), 1.0, -float("inf"), float("inf")],
         [1.0, 1.0, 1.0, float("nan"), float("inf"), -float("inf")]]
    )  # fmt: skip
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX):
            if not report.exact and op.name in {"MIN", "MAX"}:
                continue  # as its docstring says, Gloo may lose a NaN there
            inputs = [rows[rank % 2].to(dtype) for rank in range(group.size())]
            mine = inputs[group.rank()].clone()
            case = f"{dtype} {op.name}"
            report.run(case, lambda mine=mine, op=op: group.allreduce(mine, op).wait())
            report.reduced(case, mine, inputs, op)
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
            if not group.supports("all_reduce", dtype=dtype, op=op):
                continue
            wide = [torch.tensor(row, dtype=torch.float64).to(dtype).repeat(13) for row in rows]
            inputs = [wide[rank % 2] for rank in range(group.size())]
            for count in (1, 39):
                mine = inputs[group.rank()][:count].clone()
                case = f"{dtype} {op.name} of {count}"
                report.run(case, lambda mine=mine, op=op: group.allreduce(mine, op).wait())
                report.same(case, mine, reduced([tensor[:count] for tensor in inputs], op))
    report.finish(8)


def test_extremes(backend: str, world_size: int) -> None:
    if backend == "gloo":
        pytest.skip("Gloo sums before it divides, and does not order zeros; its docstring says so")
    run_ranks(extremes, world_size, backend=backend)


def test_infinities_and_nans(backend: str, world_size: int) -> None:
    run_ranks(special_values, world_size, backend=backend)


def reduce(group: ProcessGroup) -> None:
    report = Report(group)
    layouts = ("dense", "strided", "offset")
    turn = 0
    for dtype, op in offered(group, "reduce"):
        for count in (0, 1, 131):
            turn += 1
            root, layout = turn % group.size(), layouts[turn % 3]
            case = f"{dtype} {op.name} {count} {layout} root {root}"
            inputs = [values(dtype, rank, count, salt=1) for rank in range(group.size())]
            mine = place(inputs[group.rank()], layout)
            options = ReduceOptions(reduceOp=op, rootRank=root, asyncOp=turn % 2 == 0)
            report.run(case, lambda mine=mine, options=options: group.reduce([mine.tensor], options).wait())
            if group.rank() == root:
                report.reduced(case, mine.tensor, inputs, op)
            else:
                report.same(f"{case}, not the root", mine.tensor, inputs[group.rank()])
            report.whole(case, mine)
    for root in range(group.size()):
        inputs = [values(torch.float32, rank, LARGE) for rank in range(group.size())]
        mine = inputs[group.rank()].clone()
        report.run(f"large {root}", lambda mine=mine, root=root: group.reduce(mine, root=root).wait())
        if group.rank() == root:
            report.reduced(f"large, root {root}", mine, inputs, ReduceOp.SUM)
        else:
            report.same(f"large, not root {root}", mine, inputs[group.rank()])
    report.finish(50 if sparse(group) else 300)


def test_reduce(backend: str, world_size: int) -> None:
    run_ranks(reduce, world_size, backend=backend)


def scattered(
    group: ProcessGroup, dtype: torch.dtype, counts: list[int], salt: int
) -> list[list[torch.Tensor]]:
    """Returns the parts of every rank: ``[rank][part]``."""
    return [
        [values(dtype, rank, count, salt=salt + part) for part, count in enumerate(counts)]
        for rank in range(group.size())
    ]


def reduce_scatter(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    turn = 0
    for dtype, op in offered(group, "reduce_scatter"):
        for counts in ([0] * size, [1] * size, [67] * size, [(5 * part + 3) % 11 for part in range(size)]):
            turn += 1
            in_place, layout = turn % 3 == 0, ("dense", "strided")[turn % 2]
            case = f"{dtype} {op.name} {counts} {layout}{' in place' if in_place else ''}"
            parts = scattered(group, dtype, counts, 10)
            given = [place(part, layout) for part in parts[me]]
            output = given[me] if in_place else place(values(dtype, 9, counts[me]), layout)
            options = ReduceScatterOptions(reduceOp=op, asyncOp=turn % 2 == 0)
            tensors = [one.tensor for one in given]
            report.run(
                case,
                lambda o=output, t=tensors, p=options: group.reduce_scatter([o.tensor], [t], p).wait(),
            )
            report.reduced(case, output.tensor, [parts[rank][me] for rank in range(size)], op)
            for part in range(size):
                if not (in_place and part == me):
                    report.same(f"{case}, input {part}", given[part].tensor, parts[me][part])
            report.whole(case, output, *given)
    report.finish(50 if sparse(group) else 300)


def test_reduce_scatter(backend: str, world_size: int) -> None:
    run_ranks(reduce_scatter, world_size, backend=backend)


def reduce_scatter_single(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    turn = 0
    for dtype, op in offered(group, "reduce_scatter_tensor"):
        for count in (0, 1, 131):
            turn += 1
            in_place = turn % 3 == 0
            layout = "dense" if in_place else ("dense", "strided", "offset")[turn % 3]
            case = f"{dtype} {op.name} {count} {layout}{' in place' if in_place else ''}"
            inputs = [values(dtype, rank, count * size, salt=3) for rank in range(size)]
            given = place(inputs[me], layout)
            output = place(values(dtype, 9, count), layout)
            if in_place:
                output.tensor = given.tensor[me * count : (me + 1) * count]
                output.buffer = given.buffer
            options = ReduceScatterOptions(reduceOp=op, asyncOp=turn % 2 == 0)
            report.run(
                case,
                lambda o=output, g=given, p=options: group.reduce_scatter_single(
                    o.tensor, g.tensor, p
                ).wait(),
            )
            mine = slice(me * count, (me + 1) * count)
            report.reduced(case, output.tensor, [inputs[rank][mine] for rank in range(size)], op)
            if not in_place:
                report.same(f"{case}, input", given.tensor, inputs[me])
                report.whole(case, output, given)
    # A stack: one row for each rank.
    inputs = [values(torch.float32, rank, 6 * size, salt=4).view(size, 2, 3) for rank in range(size)]
    output = torch.empty(2, 3)
    report.run("stack", lambda: group.reduce_scatter_single(output, inputs[me].clone()).wait())
    report.reduced("stack", output, [tensor[me].reshape(-1) for tensor in inputs], ReduceOp.SUM)
    report.finish(50 if sparse(group) else 300)


def test_reduce_scatter_single(backend: str, world_size: int) -> None:
    run_ranks(reduce_scatter_single, world_size, backend=backend)


def bits_of_one_sum(group: ProcessGroup) -> None:
    """A sum's bits depend on its addends, not on operation, size of the message or place in it."""
    report, me, size = Report(group), group.rank(), group.size()
    for dtype in (dtype for dtype in FLOATS if group.supports("all_reduce", dtype=dtype)):
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
            rooted = mine.clone()
            report.run("reduce", lambda r=rooted, op=op: group.reduce(r, root=0, op=op).wait())
            if me == 0:
                report.same(f"{dtype} {op.name} reduce", rooted, alone)
            part = torch.empty_like(mine)
            report.run(
                "reduce_scatter",
                lambda p=part, m=mine, op=op: group.reduce_scatter(p, [m] * size, op).wait(),
            )
            report.same(f"{dtype} {op.name} reduce_scatter", part, alone)
    report.finish(50)


def test_bits_do_not_depend_on_the_message(backend: str, world_size: int) -> None:
    if backend == "gloo":
        pytest.skip("Gloo does not promise it; its docstring says so")
    run_ranks(bits_of_one_sum, world_size, backend=backend)
