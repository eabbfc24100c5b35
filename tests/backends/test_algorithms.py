"""All-reduces made of messages and broadcasts: the right bits in the order that each of them states."""

from __future__ import annotations

import pytest
import torch
from conformance.oracle import DTYPES, OPS, PREMUL, Report, place, reduced, values
from harness import run_ranks

from collectives import ProcessGroup, ReduceOp, UnsupportedOperationError
from collectives.backends._shared.arithmetic import REDUCTIONS
from collectives.backends.algorithms import ALGORITHMS, all_reduce

LAYOUTS = ("dense", "strided", "transposed", "offset")
COUNTS = (0, 1, 7, 1009)
LARGE = 100_003
CAREFUL = (
    (torch.float32, PREMUL),
    (torch.bfloat16, ReduceOp.AVG),
    (torch.int64, ReduceOp.AVG),
    (torch.uint64, ReduceOp.AVG),
    (torch.complex32, PREMUL),
)
"""Data types and reductions whose partials are of another kind each; taken with every count."""


def wanted(algorithm: str, inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    size = len(inputs)
    if algorithm == "tree":  # of at most 5 ranks: pairs, and then these from left to right
        return reduced(inputs, op, [list(range(size))[r : r + 2] for r in range(0, size, 2)])
    if algorithm == "ring":
        count = inputs[0].numel()
        parts = [slice(count * c // size, count * (c + 1) // size) for c in range(size)]
        turned = [[*inputs[c + 1 :], *inputs[: c + 1]] for c in range(size)]
        whole = torch.empty_like(inputs[0])
        for part, given in zip(parts, turned, strict=True):
            whole[part] = reduced([tensor[part] for tensor in given], op)
        return whole
    return reduced(inputs, op)


def cases(group: ProcessGroup):
    turn = group.size()
    for dtype in DTYPES:
        ops = [op for op in OPS if op.name in REDUCTIONS[dtype]]
        for op in ops if group.size() == 2 and group.name() == "host" else [ops[turn % len(ops)]]:
            turn += 1
            yield dtype, op, (1, 4, 131)[turn % 3], LAYOUTS[turn % 4]
    yield torch.float32, ReduceOp.SUM, 1, "scalar"
    for dtype, op in CAREFUL:
        for count in COUNTS:
            yield dtype, op, count, "dense"
    yield torch.float32, ReduceOp.SUM, LARGE, "dense"
    yield torch.bfloat16, PREMUL, LARGE, "strided"


def against_the_oracle(group: ProcessGroup) -> None:
    report = Report(group)
    for dtype, op, count, layout in cases(group):
        inputs = [values(dtype, rank, count) for rank in range(group.size())]
        for algorithm in ALGORITHMS:
            case = f"{algorithm} {dtype} {op.name} {count} {layout}"
            mine = place(inputs[group.rank()], layout)
            report.run(case, lambda a=algorithm, mine=mine, op=op: all_reduce(mine.tensor, a, group, op))
            report.same(case, mine.tensor, wanted(algorithm, inputs, op))
            report.whole(case, mine)
    report.finish(4 * (len(DTYPES) + len(CAREFUL) * len(COUNTS)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_bits_and_order(backend: str, ranks: int) -> None:
    run_ranks(against_the_oracle, ranks, backend=backend)


def among_other_messages(group: ProcessGroup) -> list[str]:
    """Refused arguments send nothing, and messages of the user's own are not taken for an algorithm's."""
    errors = []
    refused = (
        (torch.ones(2), "rings", ReduceOp.SUM),
        (torch.ones(2, dtype=torch.bool), "ring", ReduceOp.AVG),
        (torch.ones(2, device="meta"), "tree", ReduceOp.SUM),
        (torch.eye(2).to_sparse(), "naive", ReduceOp.SUM),
        (torch.ones(1).expand(3), "gather", ReduceOp.SUM),
    )
    for tensor, algorithm, op in refused:
        with pytest.raises((ValueError, TypeError, UnsupportedOperationError)) as caught:
            all_reduce(tensor, algorithm, group, op)
        errors.append(str(caught.value))
    other = 1 - group.rank()
    late, tensor = torch.zeros(3), torch.ones(3)
    receive = group.recv([late], other)
    for algorithm in ALGORITHMS:
        all_reduce(tensor, algorithm, group)
    assert tensor.tolist() == [16.0] * 3
    group.send([torch.full((3,), 5.0)], other).wait()
    receive.wait()
    assert late.tolist() == [5.0] * 3
    return errors


@pytest.mark.parametrize("backend", ["host", "gloo", "round_robin"])
def test_refusals_and_messages_of_others(backend: str) -> None:
    for rank, errors in enumerate(run_ranks(among_other_messages, 2, backend=backend)):
        assert all(f"[rank {rank}] all_reduce on " in error for error in errors)
        expected = (
            "no algorithm is named 'rings'; there are naive, gather, ring, tree",
            "ring: AVG of torch.bool is not defined",
            "meta",
            "layout torch.sparse_coo are not taken",
            "share their memory",
        )
        assert [text for text, error in zip(expected, errors, strict=True) if text not in error] == []
