"""Operations that only move data: every data type that torch can hold, count, layout, root, uneven parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from conformance.oracle import BYTES_ONLY, DTYPES, Placed, Report, place, raw, values
from harness import run_ranks

from collectives import ProcessGroup
from collectives.core.types import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

LARGE = 300_007


def cases(group: ProcessGroup, operation: str) -> Iterator[tuple[int, torch.dtype, int, str]]:
    """Yields turn, data type, count and layout; a backend that cannot move a data type fails."""
    turn = 0
    for dtype in (*DTYPES, *BYTES_ONLY):
        reason = group.capabilities.why_not(operation, device="cpu", dtype=dtype)
        assert reason is None, reason
        shapes = [(0, "dense"), (1, "scalar"), (7, "dense"), (1009, "dense")]
        if dtype not in BYTES_ONLY:
            shapes += [(0, "strided"), (65, "strided"), (60, "transposed"), (131, "offset")]
        for count, layout in shapes:
            yield turn, dtype, count, layout
            turn += 1
    for dtype, layout in ((torch.float32, "dense"), (torch.uint8, "offset"), (torch.complex128, "dense")):
        yield turn, dtype, LARGE, layout
        turn += 1


def blank(dtype: torch.dtype, count: int, layout: str) -> Placed:
    """Returns an output that holds other values than any that it must get."""
    return place(values(dtype, 77, count, salt=99), layout)


def broadcast(group: ProcessGroup) -> None:
    report = Report(group)
    for turn, dtype, count, layout in cases(group, "broadcast"):
        root = turn % group.size()
        case = f"{dtype} {count} {layout} root {root}"
        mine = place(values(dtype, group.rank(), count), layout)
        options = BroadcastOptions(rootRank=root, asyncOp=turn % 2 == 0)
        report.run(case, lambda m=mine, o=options: group.broadcast([m.tensor], o).wait())
        report.same(case, mine.tensor, values(dtype, root, count))
        report.whole(case, mine)
    for root in range(group.size()):
        mine = values(torch.int64, group.rank(), 33)
        report.run(f"root {root}", lambda m=mine, r=root: group.broadcast(m, root=r).wait())
        report.same(f"root {root}", mine, values(torch.int64, root, 33))
    report.finish(150)


def test_broadcast(backend: str, world_size: int) -> None:
    run_ranks(broadcast, world_size, backend=backend)


def all_gather(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    for turn, dtype, count, layout in cases(group, "all_gather"):
        case = f"{dtype} {count} {layout}"
        mine = place(values(dtype, me, count), layout)
        outputs = [blank(dtype, count, layout) for _ in range(size)]
        tensors = [output.tensor for output in outputs]
        options = AllgatherOptions(asyncOp=turn % 2 == 0)
        report.run(case, lambda m=mine, t=tensors, o=options: group.allgather([t], [m.tensor], o).wait())
        for rank in range(size):
            report.same(f"{case}, output {rank}", tensors[rank], values(dtype, rank, count))
        report.same(f"{case}, input", mine.tensor, values(dtype, me, count))
        report.whole(case, mine, *outputs)
    report.finish(150)


def test_all_gather(backend: str, world_size: int) -> None:
    run_ranks(all_gather, world_size, backend=backend)


UNEVEN = ((0, 5, 1, 9), (3, 0, 0, 0), (1, 2, 40_009, 7), (0, 0, 0, 2), (11, 11, 11, 12))


def all_gather_uneven(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    assert group.capabilities.uneven
    for turn, counts in enumerate(UNEVEN * 2):
        dtype = (torch.float32, torch.int16, torch.bool, torch.complex64)[turn % 4]
        layout = ("dense", "strided")[turn % 2]
        case = f"{dtype} {counts[:size]} {layout}"
        mine = place(values(dtype, me, counts[me]), layout)
        outputs = [blank(dtype, counts[rank], layout) for rank in range(size)]
        tensors = [output.tensor for output in outputs]
        report.run(case, lambda m=mine, t=tensors: group.allgather(t, m.tensor).wait())
        for rank in range(size):
            report.same(f"{case}, output {rank}", tensors[rank], values(dtype, rank, counts[rank]))
        report.whole(case, mine, *outputs)
    # One call may give every rank a shape of its own.
    outputs = [torch.empty(rank + 1, 2) for rank in range(size)]
    mine = values(torch.float32, me, 2 * (me + 1)).view(me + 1, 2)
    report.run("shapes", lambda: group.allgather(outputs, mine).wait())
    for rank in range(size):
        report.same(f"shapes, output {rank}", outputs[rank], values(torch.float32, rank, 2 * (rank + 1)))
    report.finish(len(UNEVEN) * 2)


def test_all_gather_of_different_sizes(backend: str, world_size: int) -> None:
    run_ranks(all_gather_uneven, world_size, backend=backend)


def all_gather_single(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    for turn, dtype, count, given_layout in cases(group, "all_gather_into_tensor"):
        in_place = turn % 3 == 0
        layout = "dense" if in_place or given_layout == "scalar" else given_layout
        case = f"{dtype} {count} {layout}{' in place' if in_place else ''}"
        output = blank(dtype, count * size, layout)
        mine = place(values(dtype, me, count), layout)
        if in_place:
            raw_part = raw_view(output.tensor)[me * mine.buffer.numel() : (me + 1) * mine.buffer.numel()]
            raw_part.copy_(mine.buffer)
            mine.tensor = raw_part.view(dtype)
        options = AllgatherOptions(asyncOp=turn % 2 == 0)
        report.run(
            case, lambda r=output, m=mine, o=options: group.all_gather_single(r.tensor, m.tensor, o).wait()
        )
        report.same(case, output.tensor, joined([values(dtype, rank, count) for rank in range(size)]))
        report.whole(case, output)
    # A stack: a row for each rank.
    stack = torch.empty(size, 2, 3)
    mine = values(torch.float32, me, 6).view(2, 3)
    report.run("stack", lambda: group.all_gather_single(stack, mine).wait())
    for rank in range(size):
        report.same(f"stack, row {rank}", stack[rank], values(torch.float32, rank, 6))
    report.finish(150)


def raw_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates flat tensors of any data type."""
    return torch.cat([raw(part) for part in parts]).view(parts[0].dtype)


def test_all_gather_single(backend: str, world_size: int) -> None:
    run_ranks(all_gather_single, world_size, backend=backend)


def gather(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    for turn, dtype, count, layout in cases(group, "gather"):
        root = turn % size
        case = f"{dtype} {count} {layout} root {root}"
        mine = place(values(dtype, me, count), layout)
        outputs = [blank(dtype, count, layout) for _ in range(size)] if me == root else []
        tensors = [output.tensor for output in outputs]
        options = GatherOptions(rootRank=root, asyncOp=turn % 2 == 0)
        report.run(
            case,
            lambda m=mine, t=tensors, o=options: group.gather([t] if t else [], [m.tensor], o).wait(),
        )
        for rank, tensor in enumerate(tensors):
            report.same(f"{case}, output {rank}", tensor, values(dtype, rank, count))
        report.same(f"{case}, input", mine.tensor, values(dtype, me, count))
        report.whole(case, mine, *outputs)
    report.finish(150)


def test_gather(backend: str, world_size: int) -> None:
    run_ranks(gather, world_size, backend=backend)


def scatter(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    for turn, dtype, count, layout in cases(group, "scatter"):
        root = turn % size
        case = f"{dtype} {count} {layout} root {root}"
        output = blank(dtype, count, layout)
        given = [place(values(dtype, me, count, salt=to), layout) for to in range(size)] if me == root else []
        tensors = [one.tensor for one in given]
        options = ScatterOptions(rootRank=root, asyncOp=turn % 2 == 0)
        report.run(
            case,
            lambda r=output, t=tensors, o=options: group.scatter([r.tensor], [t] if t else [], o).wait(),
        )
        report.same(case, output.tensor, values(dtype, root, count, salt=me))
        for to, tensor in enumerate(tensors):
            report.same(f"{case}, input {to}", tensor, values(dtype, me, count, salt=to))
        report.whole(case, output, *given)
    report.finish(150)


def test_scatter(backend: str, world_size: int) -> None:
    run_ranks(scatter, world_size, backend=backend)


def all_to_all(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    for turn, dtype, count, layout in cases(group, "all_to_all"):
        # What rank a sends to rank b has count elements, or in every third case as many as differ with both.
        uneven = turn % 3 == 0 and layout != "scalar" and count < LARGE

        def amount(sender: int, receiver: int, count: int = count, uneven: bool = uneven) -> int:
            return (count + 3 * sender + 5 * receiver) % 13 if uneven else count

        case = f"{dtype} {'uneven' if uneven else count} {layout}"
        given = [place(values(dtype, me, amount(me, to), salt=to), layout) for to in range(size)]
        outputs = [blank(dtype, amount(sender, me), layout) for sender in range(size)]
        sent, got = [one.tensor for one in given], [one.tensor for one in outputs]
        options = AllToAllOptions(asyncOp=turn % 2 == 0)
        report.run(case, lambda g=got, s=sent, o=options: group.alltoall(g, s, o).wait())
        for rank in range(size):
            report.same(f"{case}, from {rank}", got[rank], values(dtype, rank, amount(rank, me), salt=me))
            report.same(f"{case}, to {rank}", sent[rank], values(dtype, me, amount(me, rank), salt=rank))
        report.whole(case, *given, *outputs)
    report.finish(150)


def test_all_to_all(backend: str, world_size: int) -> None:
    run_ranks(all_to_all, world_size, backend=backend)


def all_to_all_single(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    for turn, dtype, count, given_layout in cases(group, "all_to_all_single"):
        layout = "dense" if given_layout in {"scalar", "transposed"} else given_layout
        uneven = turn % 2 == 0 and count < LARGE

        def amount(sender: int, receiver: int, count: int = count, uneven: bool = uneven) -> int:
            return (count + 3 * sender + 5 * receiver) % 13 if uneven else count

        case = f"{dtype} {'uneven' if uneven else count} {layout}"
        to_others = [amount(me, to) for to in range(size)]
        from_others = [amount(sender, me) for sender in range(size)]
        given = place(joined([values(dtype, me, n, salt=to) for to, n in enumerate(to_others)]), layout)
        output = blank(dtype, sum(from_others), layout)
        splits = (from_others, to_others) if uneven else ((None, None), ([], []))[turn % 4 == 1]
        options = AllToAllOptions(asyncOp=turn % 4 < 2)
        report.run(
            case,
            lambda r=output, g=given, s=splits, o=options: group.alltoall_base(
                r.tensor, g.tensor, *s, o
            ).wait(),
        )
        expected = joined([values(dtype, sender, n, salt=me) for sender, n in enumerate(from_others)])
        report.same(case, output.tensor, expected)
        report.whole(case, output, given)
    # Splits count rows, not elements.
    rows = values(torch.float32, me, 3 * (size + 1)).view(size + 1, 3)
    sent = [2, *[1] * (size - 1)]
    received = [2 if me == 0 else 1] * size
    output = torch.empty(sum(received), 3)
    report.run("rows", lambda: group.alltoall_base(output, rows, received, sent).wait())
    start = 0 if me == 0 else me + 1
    for sender in range(size):
        part = values(torch.float32, sender, 3 * (size + 1)).view(size + 1, 3)[
            start : start + received[sender]
        ]
        at = sum(received[:sender])
        report.same(f"rows from {sender}", output[at : at + received[sender]], part)
    report.finish(150)


def test_all_to_all_single(backend: str, world_size: int) -> None:
    run_ranks(all_to_all_single, world_size, backend=backend)


def other_tensors(group: ProcessGroup) -> None:
    """Kinds of tensors whose memory does not hold their values plainly, and those that autograd watches."""
    report, me, size = Report(group), group.rank(), group.size()
    expected = [values(torch.complex64, rank, 9) for rank in range(size)]
    lazy = torch.conj(values(torch.complex64, me, 9))
    outputs = [torch.empty(9, dtype=torch.complex64) for _ in range(size)]
    report.run("conjugate", lambda: group.allgather(outputs, lazy).wait())
    for rank in range(size):
        report.same(f"conjugate {rank}", outputs[rank], torch.conj(expected[rank]).resolve_conj())
    target = torch.conj(torch.zeros(9, dtype=torch.complex64))
    if me == 0:
        target.copy_(expected[0])
    report.run("into conjugate", lambda: group.broadcast(target, root=0).wait())
    report.same("into conjugate", target.resolve_conj(), expected[0])

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
            mine = torch.quantize_per_tensor(torch.arange(5.0) + me, 0.5, 3, kind)
            report.run(f"{kind}", lambda m=mine: group.broadcast(m, root=0).wait())
            report.same(
                f"{kind}",
                mine.int_repr(),
                torch.quantize_per_tensor(torch.arange(5.0), 0.5, 3, kind).int_repr(),
            )
            with pytest.raises(NotImplementedError, match="cannot be reduced"):
                group.allreduce(mine)
    report.finish(8)


def test_other_kinds_of_tensors(backend: str, world_size: int) -> None:
    run_ranks(other_tensors, world_size, backend=backend)
