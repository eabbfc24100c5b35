"""What a world and its groups need grows with machines and ranks as the guide states."""

from __future__ import annotations

import os
import time

import harness
import pytest
import torch
from census import census, connections
from counted_store import CountedStore
from harness import run_ranks

import collectives as dist

GROUPS = 3
ASKED_IN_A_SECOND = 50
"""Most requests to the store in a second of waiting."""


def _holdings() -> dict[str, int]:
    return {**census(), "connections": connections()}


def _figures(rank: int, size: int, local: int) -> dict[str, float]:
    """Returns what this rank needs for the world, for all operations, and for each further group."""
    os.environ["COLLECTIVES_HOST_MACHINE"] = f"machine {rank // local}"
    idle = _holdings()
    store = CountedStore("growth", harness.current_store())
    began = time.monotonic()
    dist.init_process_group("host", store=store, rank=rank, world_size=size)
    forming_s = time.monotonic() - began
    formed = _holdings()
    requests, _ = store.take()
    harness.current_store().barrier("counted", size)  # the group's own makes connections
    dist.barrier()
    for count in (1, 1 << 18):
        dist.all_reduce(torch.ones(count))
        dist.all_gather([torch.empty(count) for _ in range(size)], torch.ones(count))
    dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(2), (rank + local) % size),
            dist.P2POp(dist.irecv, torch.empty(2), (rank - local) % size),
        ]
    )[-1].wait()
    dist.barrier()
    used = _holdings()
    store.take()
    began = time.monotonic()
    groups = [dist.new_group() for _ in range(GROUPS)]
    dist.barrier()
    grouping_s = time.monotonic() - began
    grouped = _holdings()
    group_requests, _ = store.take()
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return {
        "requests": requests - ASKED_IN_A_SECOND * forming_s,
        "connections": formed["connections"] - idle["connections"],
        "used connections": used["connections"] - idle["connections"],
        "descriptors": formed["descriptors"] - idle["descriptors"],
        "group requests": (group_requests - ASKED_IN_A_SECOND * grouping_s) / GROUPS,
        "group descriptors": (grouped["descriptors"] - used["descriptors"]) / GROUPS,
        "group threads": (grouped["threads"] - used["threads"]) / GROUPS,
    }


@pytest.mark.parametrize(
    ("machines", "local"),
    [(2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.full), pytest.param(4, 4, marks=pytest.mark.full)],
)
def test_needs_follow_their_law(machines: int, local: int) -> None:
    size = machines * local
    told = run_ranks(_figures, size, local, env={"COLLECTIVES_HOST_MACHINE": None})

    def most(name: str) -> float:
        return max(one[name] for one in told)

    assert most("connections") <= machines + 1  # one to the store, and one that is about to be closed
    assert most("used connections") <= 3 * machines
    assert most("descriptors") <= 6 + machines + local
    assert most("group descriptors") <= 5 + machines
    assert most("group threads") <= 1
    # Beside those of waiting, as below. Rank 0 greets those who come together with five to seven requests.
    assert most("requests") <= 50 + 5 * size
    assert most("group requests") <= 60
