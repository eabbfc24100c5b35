"""What every backend must do, on the mpi backend under mpirun: the bodies of the shared tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import (
    test_callbacks,
    test_errors,
    test_groups,
    test_interrupts,
    test_messages,
    test_statements,
    test_time_limits,
    test_values,
    test_works,
)
from conformance.oracle import Report
from harness import current_store
from mpi_team import Teams, find_installations

import collectives as dist

ON_THREE: list[Callable[..., Any]] = [
    test_values.special_values,
    test_values.extremes,
    test_values.bits_of_one_sum,
    test_values.rows_and_stacks,
    test_values.other_tensors,
    test_messages.exchange,
    test_messages.tags_and_order,
    test_messages.receives_first,
    test_messages.large_both_ways,
    test_messages.from_anyone,
    test_messages.empty_from_anyone,
    test_messages.to_oneself,
    test_messages.beside_collectives,
    test_messages.futures_of_messages,
    test_works.many_in_flight,
    test_works.states,
    test_works.polled,
    test_works.forgotten,
    test_works.futures,
    test_works.from_threads,
    test_works.coalesced,
    test_works.shared_memory,
    test_groups.barriers,
    test_groups.barrier_after,
    test_groups.monitored,
    test_errors.refused,
    test_time_limits.numbers,
]


def ids(body: Callable[..., Any]) -> str:
    return body.__name__


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", test_values.NAMES)
def test_right_values(mpi: Teams, name: str) -> None:
    every = 1 if mpi.installation is find_installations()[0] else 3  # the core does the rest alike
    found = mpi.run(test_values.right_values, 3, name, Report, "", "cpu", every)
    assert all(digests == found[0] for digests in found), "the ranks' results differ in their bits"


@pytest.mark.parametrize("body", test_callbacks.BODIES, ids=ids)
def test_callbacks_wait(mpi: Teams, body: Callable[..., Any]) -> None:
    mpi.run(body, 2)


@pytest.mark.parametrize("body", ON_THREE, ids=ids)
def test_behaviour(mpi: Teams, body: Callable[..., Any]) -> None:
    mpi.run(body, 3)


def test_what_a_handler_raises_leaves_a_wait_as_it_is(mpi: Teams) -> None:
    mpi.run(test_interrupts.passed_on, 2)


@pytest.mark.full
def test_the_gil_is_free(mpi: Teams) -> None:
    mpi.run(test_works.gil_is_free, 2)


@pytest.mark.parametrize("body", [test_groups.several, test_groups.ends], ids=ids)
def test_groups_of_all(mpi: Teams, body: Callable[..., Any]) -> None:
    mpi.run(body, 3, "mpi", backend=None)


@pytest.mark.full
def test_sub_groups(mpi: Teams) -> None:
    results = mpi.run(test_groups.subgroups, 4, "mpi", backend=None)
    for rank, seen in enumerate(results):
        half = sum(member for member in range(4) if member % 2 == rank % 2)
        assert seen == [half, rank, 6.0, *([6.0] if rank else [])]


@pytest.mark.full
def test_groups_leave_no_descriptors_and_threads(mpi: Teams) -> None:
    for descriptors, threads in mpi.run(test_groups.cycles, 2, "mpi", backend=None):
        assert descriptors <= 3
        assert threads <= 0


def test_identity(mpi: Teams) -> None:
    assert mpi.run(test_groups.identity, 2, "mpi", 2, group_desc="a test") == [0, 1]


@pytest.mark.full
def test_statements_hold(mpi: Teams) -> None:
    results = mpi.run(test_statements.hold, 2, "mpi")
    assert results[0] == results[1]
    assert min(results[0]) > 100


def small_ones(rank: int, size: int) -> None:
    """All-reduces of small tensors: beside others in flight, late ranks, and layouts that only some have."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    whole = size * (size + 1) / 2
    for turn in range(12):
        large, apart = torch.full((300_000,), rank + 1.0), torch.full((2,), rank + 1.0)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (large, apart)]
        if rank == turn % size:
            time.sleep(0.02 * (turn % 4))
        x = torch.full((2, 2), float(turn))[:, 0] if rank == turn % size else torch.full((2,), float(turn))
        dist.all_reduce(x)
        assert x.tolist() == [float(size * turn)] * 2
        dist.all_reduce(x := torch.full((3,), rank + 1, dtype=torch.int16), dist.ReduceOp.MAX)
        assert x.tolist() == [size] * 3
        dist.all_reduce(x := torch.full((1,), rank + 1.0, dtype=torch.bfloat16), dist.ReduceOp.AVG)
        assert x.item() == whole / size
        for work in works:
            assert work is not None
            work.wait()
        assert bool((large == whole).all())
        assert apart.tolist() == [whole] * 2
    for nbytes in range(1, 1100, 7):  # across the largest that takes the fast path
        dist.all_reduce(x := torch.full((nbytes,), rank + 1, dtype=torch.uint8))
        assert x.unique().tolist() == [whole]
    dist.destroy_process_group()


def test_small_all_reduces(mpi: Teams) -> None:
    mpi.run(small_ones, 3, backend=None)


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same values in memory with gaps."""
    return torch.stack([tensor, torch.full_like(tensor, -7)], -1)[..., 0]


def every_way(rank: int, size: int) -> None:
    """Ranks carry out one operation in different ways: the tensors of one have gaps, or it comes late."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    whole = size * (size + 1) / 2
    turn = 0

    def make(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal turn
        turn += 1
        if turn % (2 * size) == rank:
            return [gapped(tensor) for tensor in tensors]
        if turn % (2 * size) == size + rank:
            time.sleep(0.004)  # longer than a call tests its messages
        return list(tensors)

    def same(tensor: torch.Tensor, value: float) -> None:
        assert bool((tensor == value).all()), (turn, tensor)

    # Among them sizes on both sides of each threshold.
    for count in (1, 300, 5_000, 6_000, 21_000, 80_000, 1_700_000):
        for root in range(size):
            full, last = torch.full((count,), rank + 1.0), torch.full((size, count), rank + 1.0)
            (x,) = make(full.clone())
            dist.all_reduce(x)
            same(x, whole)
            (x,) = make(full.clone())
            dist.reduce(x, root, dist.ReduceOp.MAX)
            same(x, size if rank == root else rank + 1.0)
            (x,) = make(full.clone())
            dist.broadcast(x, root)
            same(x, root + 1.0)
            x, y = make(last.clone(), full)
            dist.all_gather_into_tensor(x, y)
            for other, part in enumerate(x):
                same(part, other + 1.0)
            x, y = make(full.clone(), last)
            dist.reduce_scatter_tensor(x, y)
            same(x, whole)
            if count > 80_000 or root:
                continue
            parts = make(*(torch.empty(count) for _ in range(size)))
            dist.all_gather(parts, full)
            assert [part[0].item() for part in parts] == [other + 1.0 for other in range(size)]
            parts = make(*last)
            dist.gather(full, parts if rank == root else None, dst=root)
            dist.scatter(x, [part * 2 for part in parts] if rank == root else None, src=root)
            same(x, rank * 2 + 2.0)
            x, y = make(torch.empty(size * count), torch.arange(size).repeat_interleave(count) + 10.0 * rank)
            dist.all_to_all_single(x, y)
            assert x[::count].tolist() == [10.0 * other + rank for other in range(size)]
        dist.barrier()
    dist.destroy_process_group()


def test_ranks_may_go_different_ways(mpi: Teams) -> None:
    mpi.run(every_way, 3, backend=None)


def plain_messages(rank: int, size: int) -> None:
    """Blocking messages beside those with a Work; late ones, large tags, wrong lengths."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 100_000):
        for tag in (0, 7, 2**31 - 1):
            given, got = (
                torch.full((count,), rank + tag, dtype=torch.float64),
                torch.empty(count, dtype=torch.float64),
            )
            work = dist.isend(given, after, tag=tag)
            if rank == count % size:
                time.sleep(0.004)
            assert dist.recv(got, before, tag=tag) == before
            assert work is not None
            work.wait()
            work = dist.irecv(got.zero_(), before, tag=tag)
            dist.send(given, after, tag=tag)
            assert work is not None
            work.wait()
            assert got.unique().tolist() == ([float(before + tag)] if count else [])
    for late in (False, True):
        for count in (2, 9):
            if rank == 0:
                time.sleep(0.01 * late)
                dist.send(torch.ones(5), 1)
            elif rank == 1:
                time.sleep(0.01 * (not late))
                with pytest.raises(dist.DistBackendError, match=r"20 bytes.* 36$|longer than the tensor"):
                    dist.recv(torch.ones(count), 0)
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == size
    dist.destroy_process_group()


def test_blocking_messages(mpi: Teams) -> None:
    mpi.run(plain_messages, 3, backend=None)


LARGE = 2**31 + 5
"""More bytes than C's int can count."""


def large_counts(rank: int, size: int) -> None:
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    places = [0, 2**31, LARGE - 1]
    x = torch.zeros(LARGE, dtype=torch.int8)
    if rank == 0:
        x[places] = torch.tensor([3, 5, 7], dtype=torch.int8)
    dist.broadcast(x, 0)
    assert x[places].tolist() == [3, 5, 7]
    dist.all_reduce(x)
    assert x[places].tolist() == [6, 10, 14]
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x.zero_(), 0)
        assert x[places].tolist() == [6, 10, 14]
    half = LARGE // 2 + 1
    dist.all_gather_into_tensor(whole := x.new_zeros(2 * half), x[:half].fill_(rank + 1))
    assert whole[[0, half - 1, half, 2 * half - 1]].tolist() == [1, 1, 2, 2]
    dist.destroy_process_group()


@pytest.mark.full
def test_counts_beyond_those_of_an_int(mpi: Teams) -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    gigabytes = int(lines["MemAvailable"].split()[0]) / 2**20
    if gigabytes < 12:
        pytest.skip(f"needs 12 GiB of memory, but {gigabytes:.1f} are available")
    mpi.run(large_counts, 2, backend=None, timeout=100.0)
