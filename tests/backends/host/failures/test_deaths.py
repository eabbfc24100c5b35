"""Ranks that die at any moment of the life of a group: every other rank names them, before any time limit.

All workloads run at once, each in a group of its own on a thread of its own, so that one death hits many
moments.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import refused_calls
import torch
from harness import Died, current_store, run_ranks

import collectives as dist
from collectives.backends.host import ProcessGroupHost
from collectives.store import PrefixStore

PATIENT = timedelta(seconds=15)
SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)


def small(group):
    group.allreduce([torch.ones(2)], SYNCHRONOUS)


def long(group):
    group.allreduce([torch.ones(2_000_000)], SYNCHRONOUS)


def many_in_flight(group):
    works = [group.allreduce([torch.ones(1000)]) for _ in range(50)]
    works += [group.reduce_scatter_single(torch.ones(3), torch.ones(3 * group.size())) for _ in range(50)]
    for work in works:
        work.wait()


def futures(group):
    futures = [group.allreduce([torch.ones(100_000)]).get_future() for _ in range(5)]
    for future in futures:
        future.wait()


def barriers(group):
    group.barrier().wait()


def rooted(group):
    outputs = [[torch.ones(50_000) for _ in range(group.size())]]
    for root in range(group.size()):
        group.broadcast([torch.ones(50_000)], root=root).wait()
        group.gather(outputs if group.rank() == root else [], [torch.ones(50_000)], root=root).wait()


def exchanges(group):
    count = 30_000 * group.size()
    group.alltoall_base(torch.ones(count), torch.ones(count), None, None).wait()


def messages(group):
    """Round the ring, in pieces that do not fit a mailbox."""
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sending = group.send([torch.ones(300_000)], after)
    group.recv([torch.ones(300_000)], before).wait()
    sending.wait()


def from_anybody(group):
    """Rank 0 waits for whoever comes, and answers when all have."""
    others = range(1, group.size())
    if group.rank() == 0:
        for _ in others:
            group.recv_anysource([torch.ones(10)], 3).wait()
        for rank in others:
            group.send([torch.ones(10)], rank, 4).wait()
    else:
        group.send([torch.ones(10)], 0, 3).wait()
        group.recv([torch.ones(10)], 0, 4).wait()


WORKLOADS: list[Callable[[ProcessGroupHost], None]] = [
    small, long, many_in_flight, futures, barriers, rooted, exchanges, messages, from_anybody,
]  # fmt: skip


def repeat(workload, group, outcomes):
    """Repeats a workload until an error ends it; notes which."""
    try:
        while True:
            workload(group)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        lost = error.rank if isinstance(error, dist.PeerLostError) else None
        outcomes.append((workload.__name__, lost, f"{type(error).__name__}: {error}"))


def run_workloads(rank, size, victim, delay):
    """Returns what each workload of a survivor came to."""
    store = current_store()
    groups = [ProcessGroupHost(PrefixStore(w.__name__, store), rank, size, PATIENT, group_name=w.__name__)
              for w in WORKLOADS]  # fmt: skip
    outcomes = []
    threads = [
        threading.Thread(target=repeat, args=(workload, group, outcomes), daemon=True)
        for workload, group in zip(WORKLOADS, groups, strict=True)
    ]
    for thread in threads:
        thread.start()
    if rank == victim:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    for group in groups:
        group.shutdown()
    return outcomes


def complaints_of(results, victim):
    found = []
    for rank, outcomes in enumerate(results):
        if rank == victim:
            continue
        missing = {workload.__name__ for workload in WORKLOADS} - {outcome[0] for outcome in outcomes}
        found += [f"rank {rank}: {name} never ended" for name in missing]
        found += [f"rank {rank}: {name}: {text}" for name, lost, text in outcomes if lost != victim]
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("placement", "victim"),
    [("aaaa", 0), ("aaaa", 1), ("aaaa", 3), ("aabb", 0), ("aabb", 2), ("aabb", 3), ("abcd", 1)],
)
def test_every_workload_names_the_dead(placement, victim):
    delay = random.Random(victim).uniform(0.05, 0.4)
    results = run_ranks(run_workloads, 4, victim, delay, isolated=True, lost=[victim], placement=placement)
    assert results[victim] == Died(-signal.SIGKILL)
    complaints = complaints_of(results, victim)
    assert not complaints, f"killed after {delay:.3f} s:\n" + "\n".join(complaints)


def without_descriptors_of_processes(rank, size):
    """A killed rank that its parent has not reaped, where the kernel knows no ``pidfd_open``."""
    refused_calls.refuse_pidfd_open()
    group = ProcessGroupHost(current_store(), rank, size, timedelta(seconds=60), group_name="group")
    group.barrier().wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(dist.PeerLostError) as info:
        group.barrier().wait()
    assert info.value.rank == 1
    return time.monotonic() - began


@pytest.mark.skipif(not refused_calls.AVAILABLE, reason="needs the numbers of system calls here")
def test_a_rank_that_nobody_has_reaped_is_dead():
    results = run_ranks(without_descriptors_of_processes, 3, isolated=True, lost=[1])
    assert results[1] == Died(-signal.SIGKILL)
    assert max(results[0], results[2]) < 15
