"""Operations that the base class derives from those of a backend."""

from __future__ import annotations

import torch
from harness import current_store, run_ranks

from collectives import AllToAllOptions, ProcessGroup
from collectives.backends.host import ProcessGroupHost
from collectives.core.work import CompletedWork


class Blocking(ProcessGroupHost):
    """Leaves collectives of messages to the base class, and receives before ``_recv`` returns."""

    fast_collective = ProcessGroup.fast_collective

    def issue(self, call):
        return getattr(self, call.operation.handler)(call)

    def _recv(self, tensor, src, tag):
        super()._recv(tensor, src, tag).wait()
        return CompletedWork([tensor])


def exchanges(rank, size):
    group = Blocking(current_store(), rank, size)
    outputs = [torch.zeros(3) for _ in range(size)]
    group.alltoall(
        outputs, [torch.full((3,), 10.0 * rank + r) for r in range(size)], AllToAllOptions()
    ).wait()
    flat = torch.zeros(size)
    group.alltoall_base(flat, torch.arange(size) + 10.0 * rank, [], [], AllToAllOptions()).wait()
    group.shutdown()
    return [float(output[0]) for output in outputs], flat.tolist()


def test_all_to_all_over_messages_that_are_received_at_once() -> None:
    for rank, found in enumerate(run_ranks(exchanges, 3)):
        assert found == ([10.0 * r + rank for r in range(3)],) * 2


def packed(rank, size):
    """Types that torch cannot copy; in memory with gaps, too."""
    group = Blocking(current_store(), rank, size)
    problems = []

    def four_bits(*values, gaps=False):
        flat = torch.zeros(2 * len(values) if gaps else len(values), dtype=torch.uint8)
        part = flat[::2] if gaps else flat
        part.copy_(torch.tensor(values, dtype=torch.uint8))
        return part.view(torch.uint4)

    def check(what, output, *values):
        if output.view(torch.uint8).tolist() != [*values]:
            problems.append(f"{what}: {output.view(torch.uint8).tolist()}")

    for gaps in (False, True):
        outputs = [four_bits(9, 9, gaps=gaps) for _ in range(size)]
        group.gather(outputs if rank == 0 else None, four_bits(rank, 5, gaps=gaps), 0).wait()
        for r, output in enumerate(outputs if rank == 0 else ()):
            check("gather", output, r, 5)
        output = four_bits(9, 9, gaps=gaps)
        given = [four_bits(r, 6, gaps=gaps) for r in range(size)]
        group.scatter(output, given if rank == 0 else None, 0).wait()
        check("scatter", output, rank, 6)
        group.alltoall(outputs, [four_bits(rank, r, gaps=gaps) for r in range(size)]).wait()
        for r, output in enumerate(outputs):
            check("all_to_all", output, r, rank)
    flat = four_bits(*[9] * size)
    group.all_to_all_single(flat, four_bits(*[rank] * size)).wait()
    check("all_to_all_single", flat, *range(size))
    group.shutdown()
    return problems


def test_derived_operations_move_types_that_torch_cannot_copy() -> None:
    assert run_ranks(packed, 2) == [[], []]


def reshaped(rank, size):
    """Derived operations take an input with gaps and an output of another shape."""
    group = Blocking(current_store(), rank, size)
    outputs = [torch.zeros(6) for _ in range(size)]
    group.gather(outputs if rank == 0 else None, torch.arange(6.0).view(2, 3).t() + rank, 0).wait()
    group.shutdown()
    return [output.tolist() for output in outputs]


def test_derived_operations_copy_between_shapes() -> None:
    values = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert run_ranks(reshaped, 2)[0] == [values, [value + 1 for value in values]]
