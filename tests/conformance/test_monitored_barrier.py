"""monitored_barrier: names who is missing within its limit, who died and that the store died at once."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from conformance.test_failures import PATIENCE, kill_me
from harness import Died, current_store, run_ranks

from collectives import CollectiveTimeoutError, DistError, DistNetworkError, PeerLostError, ProcessGroup
from collectives.registry.backends import GroupOptions, create_group
from collectives.store import PrefixStore, TCPStore

LONG = timedelta(seconds=60)


def outcome(group: ProcessGroup, limit: timedelta, wait_all_ranks: bool = False) -> tuple[DistError, float]:
    """Returns what a barrier that cannot succeed raises, and how long that takes."""
    began = time.monotonic()
    with pytest.raises(DistError) as info:
        group.monitored_barrier(limit, wait_all_ranks)
    assert str(info.value).startswith(f"[rank {group.rank()}] monitored_barrier"), info.value
    assert info.value.operation == "monitored_barrier"
    return info.value, time.monotonic() - began


def lose_a_rank(group: ProcessGroup, lost: int, comes: bool, wait_all_ranks: bool) -> float:
    group.allreduce(torch.ones(3)).wait()
    if group.rank() == lost:
        if comes:
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # whose default action ends the process
            group.monitored_barrier(LONG)
        kill_me()
    current_store().set(f"waits{group.rank()}", "")
    if comes and group.rank() == (lost + 1) % group.size():  # one that came and died does not pass unseen
        current_store().wait(["lost"])
    error, took = outcome(group, LONG, wait_all_ranks)
    current_store().set("lost", "")
    assert isinstance(error, PeerLostError), error
    assert error.rank == lost, error
    assert f"rank {lost} " in str(error)
    return took


@pytest.mark.parametrize(("lost", "wait_all_ranks"), [(0, False), (1, True)])
def test_a_killed_rank_is_noticed_before_the_limit(backend: str, lost: int, wait_all_ranks: bool) -> None:
    results = run_ranks(
        lose_a_rank, 3, lost, False, wait_all_ranks, backend=backend, isolated=True, lost={lost}
    )
    assert results[lost] == Died(-signal.SIGKILL)
    assert max(took for rank, took in enumerate(results) if rank != lost) < PATIENCE


def test_a_rank_that_came_and_died_is_noticed(backend: str) -> None:
    results = run_ranks(lose_a_rank, 3, 1, True, False, backend=backend, isolated=True, lost={1})
    assert results[1] == Died(-signal.SIGALRM)
    assert max(results[0], results[2]) < PATIENCE


def lose_the_store(rank: int, size: int, backend: str, kept_by_member: bool, kind: type[Any]) -> float:
    """The last rank serves the store, and dies; it is a member of the group, or not."""
    members = size if kept_by_member else size - 1
    serves = rank == size - 1
    shared = current_store()
    if serves:
        store = kind("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
        shared.set("port", str(store.port))
    else:
        store = kind("127.0.0.1", int(shared.get("port")), timeout=LONG)
    if rank < members:
        options = GroupOptions(PrefixStore("a", store), rank, members, LONG, group_name="a")
        group = create_group(backend, options)
        group.allreduce(torch.ones(3)).wait()
    if serves:
        shared.wait(["waits"])
        time.sleep(1.0)  # so that the others are in the barrier
        kill_me()
    if not kept_by_member and rank == 1:
        shared.wait(["told"])  # comes late
    shared.set("waits", "")
    error, took = outcome(group, LONG)
    shared.set("told", "")
    if kept_by_member:
        assert isinstance(error, PeerLostError), error
        assert error.rank == size - 1
    else:
        assert isinstance(error, DistNetworkError), error
        assert "the store failed" in str(error)
        assert error.rank == -1
    return took


@pytest.mark.parametrize(
    ("kept_by_member", "kind"),
    [(True, TCPStore), (False, torch.distributed.TCPStore)],
    ids=["member's", "torch's, elsewhere"],
)
def test_the_death_of_the_store_is_told_as_such(backend: str, kept_by_member: bool, kind: type[Any]) -> None:
    results = run_ranks(lose_the_store, 3, backend, kept_by_member, kind, isolated=True, lost={2})
    assert max(results[:2]) < PATIENCE


def misses(group: ProcessGroup, missing: list[int], wait_all_ranks: bool) -> float:
    """Some ranks come when the others have given up, and hear the same."""
    group.allreduce(torch.ones(3)).wait()
    shared = current_store()
    here = [rank for rank in range(group.size()) if rank not in missing]
    if group.rank() in missing:
        shared.wait([f"told{rank}" for rank in here])
    limit = timedelta(seconds=0.7)
    error, took = outcome(group, limit, wait_all_ranks)
    shared.set(f"told{group.rank()}", "")
    assert isinstance(error, CollectiveTimeoutError), error
    named = tuple(missing) if wait_all_ranks else (missing[0],)
    assert error.missing_ranks == named, error
    assert error.rank == missing[0]
    group.monitored_barrier(timedelta(seconds=20))  # the group is as good as before
    return took


@pytest.mark.parametrize(
    ("missing", "wait_all_ranks"), [([0], False), ([1, 2], False), ([1, 2], True), ([0, 2], True)]
)
def test_no_rank_takes_longer_than_the_limit(missing: list[int], wait_all_ranks: bool) -> None:
    results = run_ranks(misses, 4, missing, wait_all_ranks, backend="host")
    assert max(results) < 5.0, results
