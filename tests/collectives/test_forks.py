"""A child that a rank forks: it is refused what belongs to its parent, and leaves it as it was."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch
from forked import beside_a_child, in_child, refusal
from harness import run_ranks, run_world

import collectives as dist
from collectives.backends.host import ProcessGroupHost


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
def test_operations_in_a_child_raise_and_change_nothing(backend: str, checked: bool) -> None:
    for told in run_ranks(beside_a_child, 2, checked, backend=backend):
        assert [text for text in told if "belongs to the parent of this forked process" not in text] == []


def world_beside_a_child(rank: int, size: int) -> list[str]:
    def child() -> list[str]:
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)  # as samplers ask
        told = [refusal(dist.new_group), refusal(lambda: dist.split_group(split_ranks=[[0, 1]]))]
        told.append(refusal(lambda: dist.all_reduce(torch.ones(1))))
        told.append(refusal(lambda: dist.all_gather_object([None] * size, rank)))
        dist.destroy_process_group()
        dist.init_process_group("host", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        dist.destroy_process_group()
        assert tensor.item() == 1
        return told

    told = in_child(child) if rank == 0 else []
    members = dist.new_group()  # rank 0's count of groups and its word in the store are as they were
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=members)
    assert tensor.item() == size
    return told


@pytest.mark.parametrize("world_backend", ["host", "gloo"])
def test_a_child_has_no_part_in_the_world_and_may_make_its_own(world_backend: str) -> None:
    told, _ = run_world(world_beside_a_child, 2, backend=world_backend)
    assert len(told) == 4
    assert [text for text in told if "belongs to the parent of this forked process" not in text] == []


class Stubborn(ProcessGroupHost):
    """A group that a fork finds in a state that nobody foresaw."""

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        raise RuntimeError(f"{self.group_name} was in the middle of something")


def many_beside_a_child(rank: int, size: int) -> list[str]:
    groups = [
        (Stubborn if number in {1, 4} else ProcessGroupHost)(
            dist.HashStore(), 0, 1, group_name=f"group {number}"
        )
        for number in range(6)
    ]

    def child() -> list[str]:
        return [*[refusal(group.barrier) for group in groups], *unraisable]

    unraisable: list[str] = []
    hook = sys.unraisablehook
    sys.unraisablehook = lambda told: unraisable.extend(traceback.format_exception(told.exc_value))
    try:
        told = in_child(child)
    finally:
        sys.unraisablehook = hook
    for group in groups:
        group.barrier().wait()
        group.shutdown()
    return told


def test_a_group_that_raises_in_the_child_keeps_no_other_from_being_told() -> None:
    (told,) = run_ranks(many_beside_a_child, 1)
    refusals, printed = told[:6], "".join(told[6:])
    assert [text for text in refusals if "belongs to the parent of this forked process" not in text] == []
    for number in (1, 4):
        assert f"RuntimeError: group {number} was in the middle of something" in printed
