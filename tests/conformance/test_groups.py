"""Groups: identity, several at once, sub-groups, barriers, time limits, ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conformance.test_works import eventually
from harness import current_store, run_ranks

from collectives import CollectiveTimeoutError, GroupAbortedError, ProcessGroup
from collectives.core.capabilities import OPERATIONS
from collectives.core.types import BarrierOptions
from collectives.registry.backends import GroupOptions, create_group
from collectives.store import PrefixStore


def make(backend: str, name: str, members: list[int], rank: int) -> ProcessGroup:
    """Makes a group of some ranks; called by those."""
    options = GroupOptions(
        PrefixStore(name, current_store()),
        members.index(rank),
        len(members),
        timedelta(seconds=30),
        group_name=name,
        global_ranks=tuple(members),
    )
    return create_group(backend, options)


def identity(group: ProcessGroup, backend: str, size: int) -> int:
    assert group.size() == size
    assert 0 <= group.rank() < size
    assert group.name() == group.getBackendName() == backend
    assert group.group_name.startswith("call")
    assert group.group_desc == "a test"
    assert f"{backend} group '{group.group_name}' (a test) of {size}" in group.describe()
    assert f"rank {group.rank()} of {size}" in repr(group)
    assert isinstance(group.backend_type, ProcessGroup.BackendType)
    store = group.get_group_store()
    store.set(f"identity{group.rank()}", "x")
    store.wait([f"identity{rank}" for rank in range(size)])
    can = group.capabilities
    assert can.devices == ({"cpu", "cuda"} if backend == "gloo" else {"cpu"})
    assert can.operations == set(OPERATIONS)
    assert can.uneven
    assert can.tags
    assert group.supports("all_reduce", device="cpu", dtype=torch.float32)
    assert not group.supports("all_reduce", device="meta", dtype=torch.float32)
    with pytest.raises(ValueError, match="unknown operation 'dance'"):
        group.supports("dance")
    return group.rank()


def test_identity_and_capabilities(backend: str, world_size: int) -> None:
    ranks = run_ranks(identity, world_size, backend, world_size, backend=backend, group_desc="a test")
    assert ranks == list(range(world_size))


def several(rank: int, size: int, backend: str) -> None:
    members = list(range(size))
    a, b, c = (make(backend, name, members, rank) for name in "abc")
    tensors = {name: torch.full((3,), float(rank)) for name in ("a0", "b0", "c0", "a1", "b1")}
    # Each rank issues on the groups in another order; each group sees its own in the same order.
    orders = (("a0", "b0", "c0", "a1", "b1"), ("b0", "b1", "a0", "a1", "c0"), ("c0", "a0", "a1", "b0", "b1"))
    groups = {"a": a, "b": b, "c": c}
    works = [groups[name[0]].allreduce(tensors[name]) for name in orders[rank % 3]]
    for work in works:
        work.wait()
    assert all(tensor.tolist() == [sum(range(size))] * 3 for tensor in tensors.values())
    # One that ends does not touch the others.
    b.shutdown()
    with pytest.raises(GroupAbortedError):
        b.allreduce(torch.ones(1)).wait()
    for group in (a, c):
        x = torch.ones(1)
        group.allreduce(x).wait()
        assert x.item() == size
    a.shutdown()
    c.shutdown()


def subgroups(rank: int, size: int, backend: str) -> list[float]:
    everybody = make(backend, "all", list(range(size)), rank)
    parity = [member for member in range(size) if member % 2 == rank % 2]
    half = make(backend, f"half{rank % 2}", parity, rank)
    alone = make(backend, f"alone{rank}", [rank], rank)
    tail = make(backend, "tail", list(range(size - 1, 0, -1)), rank) if rank else None
    assert half.rank() == parity.index(rank)
    seen = []
    for group in (half, alone, everybody, tail):
        if group is not None:
            x = torch.tensor([float(rank)])
            group.allreduce(x).wait()
            seen.append(x.item())
    if tail is not None:
        # Group ranks count in the order in which the members were given.
        assert tail.rank() == size - 1 - rank
        x = torch.tensor([rank])
        tail.broadcast(x, root=0).wait()
        assert x.item() == size - 1
    for group in (half, alone, everybody, tail):
        if group is not None:
            group.shutdown()
    return seen


def test_subgroups(backend: str) -> None:
    size = 4
    results = run_ranks(subgroups, size, backend)
    for rank, seen in enumerate(results):
        half = sum(member for member in range(size) if member % 2 == rank % 2)
        assert seen == [half, rank, 6.0, *([6.0] if rank else [])]


def barriers(group: ProcessGroup) -> None:
    me, size, store = group.rank(), group.size(), current_store()
    for turn in range(3):
        if me == (turn + 1) % size:
            time.sleep(0.1)
        store.set(f"here{turn}/{me}", "x")
        options = BarrierOptions(asyncOp=False) if turn == 1 else None
        group.barrier(options).wait()
        assert store.check([f"here{turn}/{rank}" for rank in range(size)]), f"barrier {turn} was passed early"
    for _ in range(30):
        group.barrier().wait()
    if me == size - 1:
        store.wait([f"issued{rank}" for rank in range(me)])
    work = group.barrier()
    if me != size - 1:
        assert not work.is_completed()
        store.set(f"issued{me}", "x")
    work.wait()
    assert work.result() == []


def barrier_after(group: ProcessGroup) -> None:
    """A barrier that is done says that the collectives issued before it are."""
    works = [group.allreduce(torch.ones(50_000)) for _ in range(6)]
    group.barrier().wait()
    assert all(work.is_completed() for work in works)


def monitored(group: ProcessGroup) -> None:
    group.monitored_barrier(timedelta(seconds=20))
    late = group.size() - 1
    if group.rank() != late:
        with pytest.raises(CollectiveTimeoutError, match=f"rank {late} did not come within 0.3 s"):
            group.monitored_barrier(timedelta(seconds=0.3))
    else:
        store = current_store()
        store.wait([f"told{rank}" for rank in range(late)])
        next(group._monitored_barriers)
    current_store().set(f"told{group.rank()}", "x")
    x = torch.ones(1)
    group.allreduce(x).wait()
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


def keys_after(group: ProcessGroup, barriers: int) -> int:
    """Returns how many keys the store holds, as rank 0 finds when nobody changes any."""
    for _ in range(barriers):
        group.monitored_barrier(timedelta(seconds=20))
    group.barrier().wait()
    count = int(current_store().num_keys())
    group.barrier().wait()
    return count


def no_more_keys(group: ProcessGroup) -> None:
    few = keys_after(group, 2)
    assert keys_after(group, 20) <= few + 1  # a key that is about to be deleted


def test_monitored_barriers_leave_no_keys_behind(backend: str) -> None:
    run_ranks(no_more_keys, 3, backend=backend)


def test_monitored_barrier_where_the_job_has_a_secret() -> None:
    run_ranks(monitored, 2, backend="host", env={"COLLECTIVES_SECRET": "a secret that all processes share"})


def ends(rank: int, size: int, backend: str) -> None:
    members = list(range(size))
    group = make(backend, "a", members, rank)
    works = [group.allreduce(torch.ones(20_000)) for _ in range(5)]
    group.shutdown()
    for work in works:
        assert work.wait()
        assert work.result()[0][0].item() == size
    group.shutdown()
    group.abort()
    for call in (
        lambda: group.allreduce(torch.ones(1)).wait(),
        lambda: group.barrier().wait(),
        lambda: group.send(torch.ones(1), rank).wait(),
    ):
        with pytest.raises(GroupAbortedError):
            call()
    # Another group of the same ranks, in the same processes, works.
    again = make(backend, "b", members, rank)
    x = torch.ones(1)
    again.allreduce(x).wait()
    assert x.item() == size
    again.abort()
    again.abort()
    again.shutdown()
    with pytest.raises(GroupAbortedError):
        again.allreduce(torch.ones(1)).wait()
    left = [PrefixStore(name, current_store()) for name in "ab"]
    assert eventually(lambda: not any(store.list_keys() for store in left)), [s.list_keys() for s in left]


def cycles(rank: int, size: int, backend: str) -> tuple[int, int]:
    def once(turn: int) -> None:
        group = make(backend, f"turn{turn}", list(range(size)), rank)
        x = torch.ones(1000)
        group.allreduce(x).wait()
        group.send(x, (rank + 1) % size)
        group.recv(x, (rank - 1) % size).wait()
        group.barrier().wait()
        group.shutdown()

    for turn in range(3):
        once(turn)
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for turn in range(3, 18):
        once(turn)
    after = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    return after[0] - before[0], after[1] - before[1]


def test_groups_leave_no_descriptors_and_threads(backend: str) -> None:
    for descriptors, threads in run_ranks(cycles, 2, backend):
        assert descriptors <= 3
        assert threads <= 0


@pytest.mark.parametrize("body", [several, ends])
def test_groups_of_all(backend: str, world_size: int, body: Callable[[int, int, str], None]) -> None:
    run_ranks(body, world_size, backend)


@pytest.mark.parametrize("body", [barriers, barrier_after])
def test_barriers(backend: str, world_size: int, body: Callable[[ProcessGroup], None]) -> None:
    run_ranks(body, world_size, backend=backend)
