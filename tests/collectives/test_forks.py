"""A child that a rank forks: it is refused what belongs to its parent, and leaves it as it was."""

from __future__ import annotations

import pytest
import torch
from forked import beside_a_child, in_child, refusal
from harness import run_ranks, run_world

import collectives as dist


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
