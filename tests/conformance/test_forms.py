"""The forms of the operations: with an option record, with its fields and a time limit, under other names."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks
from recorder import Recorder

from collectives import CollectiveTimeoutError, ProcessGroup, ReduceOp, Work
from collectives.core.operations import ALL_REDUCE, BARRIER
from collectives.core.types import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from collectives.core.work import COMPLETED
from collectives.registry.backends import GroupOptions, create_group
from collectives.registry.by_device import ProcessGroupByDevice
from collectives.store import PrefixStore

LIMIT = timedelta(seconds=40)
MAX = ReduceOp.MAX


def forms(group: ProcessGroup) -> None:
    """Every form of an operation gives the same, with a root that is not 0 and a reduction that is no sum."""
    me, size = group.rank(), group.size()
    root = size - 1
    mine = torch.tensor([me, -me])

    def check(calls: list[Callable[[Any], Work]], make: Callable[[], Any], expected: list[Any]) -> None:
        for number, call in enumerate(calls):
            tensors = make()
            call(tensors).wait()
            assert [tensor.tolist() for tensor in tensors] == expected, (number, tensors)

    check(
        [
            lambda t: group.broadcast(t, root, LIMIT),
            lambda t: group.broadcast(t[0], root, timeout=LIMIT),
            lambda t: group.broadcast(t, timeout=LIMIT, root=root),
            lambda t: group.broadcast(t, BroadcastOptions(LIMIT, True, root, 0)),
        ],
        lambda: [mine.clone()],
        [[root, -root]],
    )
    check(
        [
            lambda t: group.allreduce(t, MAX, LIMIT),
            lambda t: group.allreduce(t[0], timeout=LIMIT, op=MAX),
            lambda t: group.allreduce(t, AllreduceOptions(LIMIT, True, MAX)),
            lambda t: group.allreduce_coalesced(t, AllreduceCoalescedOptions(LIMIT, True, MAX)),
        ],
        lambda: [mine.clone()],
        [[root, 0]],
    )
    check(
        [
            lambda t: group.reduce(t, root, MAX, LIMIT),
            lambda t: group.reduce(t[0], root, MAX, timeout=LIMIT),
            lambda t: group.reduce(t, op=MAX, timeout=LIMIT, root=root),
            lambda t: group.reduce(t, ReduceOptions(LIMIT, True, MAX, root, 0)),
        ],
        lambda: [mine.clone()],
        [[root, 0]] if me == root else [mine.tolist()],
    )
    everyones = [[rank, -rank] for rank in range(size)]
    check(
        [
            lambda t: group.allgather(t, mine, LIMIT),
            lambda t: group.allgather([t], [mine], timeout=LIMIT),
            lambda t: group.allgather(t, mine, AllgatherOptions(LIMIT)),
            lambda t: group.allgather_coalesced([[one] for one in t], [mine], AllgatherOptions(LIMIT)),
        ],
        lambda: [torch.zeros_like(mine) for _ in range(size)],
        everyones,
    )
    check(
        [
            lambda t: group.gather(t, mine, root, LIMIT),
            lambda t: group.gather([t] if t else None, [mine], root, timeout=LIMIT),
            lambda t: group.gather(t, mine, timeout=LIMIT, root=root),
            lambda t: group.gather(t, mine, GatherOptions(LIMIT, True, root)),
        ],
        lambda: [torch.zeros_like(mine) for _ in range(size)] if me == root else [],
        everyones if me == root else [],
    )
    # Entry or row r of rank q holds 10q + r.
    rows = [torch.tensor([10 * me + rank]) for rank in range(size)]
    given = rows if me == root else None
    check(
        [
            lambda t: group.scatter(t, given, root, LIMIT),
            lambda t: group.scatter(t[0], [given] if given else None, root, timeout=LIMIT),
            lambda t: group.scatter(t, given, timeout=LIMIT, root=root),
            lambda t: group.scatter(t, given, ScatterOptions(LIMIT, True, root)),
        ],
        lambda: [torch.zeros_like(rows[0])],
        [[10 * root + me]],
    )
    check(
        [
            lambda t: group.reduce_scatter(t, rows, MAX, LIMIT),
            lambda t: group.reduce_scatter(t[0], [rows], timeout=LIMIT, op=MAX),
            lambda t: group.reduce_scatter(t, rows, ReduceScatterOptions(LIMIT, True, MAX)),
        ],
        lambda: [torch.zeros_like(rows[0])],
        [[10 * root + me]],
    )
    came = [[10 * rank + me] for rank in range(size)]
    check(
        [
            lambda t: group.alltoall(t, rows, LIMIT),
            lambda t: group.alltoall(t, rows, timeout=LIMIT),
            lambda t: group.alltoall(t, rows, AllToAllOptions(LIMIT)),
        ],
        lambda: [torch.zeros_like(row) for row in rows],
        came,
    )
    single(group, rows, came, check)
    for call in (group.barrier, lambda: group.barrier(LIMIT), lambda: group.barrier(timeout=LIMIT)):
        assert call().wait()


def single(
    group: ProcessGroup, rows: list[torch.Tensor], came: list[Any], check: Callable[..., None]
) -> None:
    """Those on one tensor, and several of them at once, under every name."""
    me, size = group.rank(), group.size()
    whole, largest = torch.cat(rows), [10 * (size - 1) + me]
    check(
        [
            lambda t: group.alltoall_base(t[0], whole, None, None, LIMIT),
            lambda t: group.all_to_all_single(t[0], whole, [], [], timeout=LIMIT),
            lambda t: group.alltoall_base(t[0], whole, [1] * size, [1] * size, AllToAllOptions(LIMIT)),
        ],
        lambda: [torch.zeros_like(whole)],
        [[value for (value,) in came]],
    )
    check(
        [
            lambda t: group.all_gather_single(t[0], rows[0], LIMIT),
            lambda t: group._allgather_base(t[0], rows[0], timeout=LIMIT),
            lambda t: group.all_gather_single(t[0], rows[0], AllgatherOptions(LIMIT)),
        ],
        lambda: [torch.zeros_like(whole)],
        [[10 * rank for rank in range(size)]],
    )
    check(
        [
            lambda t: group.reduce_scatter_single(t[0], whole, MAX, LIMIT),
            lambda t: group._reduce_scatter_base(t[0], whole, timeout=LIMIT, op=MAX),
            lambda t: group.reduce_scatter_single(t[0], whole, ReduceScatterOptions(LIMIT, True, MAX)),
        ],
        lambda: [torch.zeros_like(rows[0])],
        [largest],
    )
    # Several at once may differ in size and data type.
    halves = [rows[0], torch.tensor([me + 0.5, me], dtype=torch.float32)]
    check(
        [
            lambda t: group.all_gather_single_coalesced(t, halves, AllgatherOptions(LIMIT)),
            lambda t: group.allgather_into_tensor_coalesced(t, halves, AllgatherOptions(LIMIT)),
        ],
        lambda: [torch.zeros(size * half.numel(), dtype=half.dtype) for half in halves],
        [
            [10 * rank for rank in range(size)],
            [value for rank in range(size) for value in (rank + 0.5, rank)],
        ],
    )
    record = ReduceScatterOptions(LIMIT, True, MAX)
    check(
        [
            lambda t: group.reduce_scatter_single_coalesced(t, [whole, whole + 0.5], record),
            lambda t: group.reduce_scatter_tensor_coalesced(t, [whole, whole + 0.5], record),
        ],
        lambda: [torch.zeros(1, dtype=whole.dtype), torch.zeros(1)],
        [largest, [largest[0] + 0.5]],
    )
    check(
        [lambda t: group.allreduce_coalesced(t, AllreduceCoalescedOptions(LIMIT, True, ReduceOp.MIN))],
        lambda: [rows[0].clone(), halves[1].clone()],
        [[0], [0.5, 0.0]],
    )


@pytest.mark.parametrize("size", [1, 3])
def test_forms(backend: str, size: int) -> None:
    run_ranks(forms, size, backend=backend)


RECORDS: dict[str, type] = {
    "allgather": AllgatherOptions,
    "allreduce": AllreduceOptions,
    "alltoall": AllToAllOptions,
    "barrier": BarrierOptions,
    "broadcast": BroadcastOptions,
    "gather": GatherOptions,
    "reduce": ReduceOptions,
    "reduce_scatter": ReduceScatterOptions,
    "scatter": ScatterOptions,
}
ROOTS = {"broadcast": 1, "gather": 0, "reduce": 0, "scatter": 1}
"""Roots with which rank 0 waits for rank 1."""


def issue(group: ProcessGroup, name: str, opts: Any, limit: timedelta | None = None) -> Work:
    """Issues an operation; ``opts`` are its record, or its root."""
    size, x = group.size(), torch.ones(2)
    mine = [torch.ones(2) for _ in range(size)] if group.rank() == ROOTS.get(name) else None
    outputs, inputs = ([torch.ones(2) for _ in range(size)] for _ in range(2))
    call = getattr(group, name)
    arguments: dict[str, tuple[Any, ...]] = {
        "allgather": (outputs, x, opts, limit),
        "alltoall": (outputs, inputs, opts, limit),
        "barrier": (opts, limit),
        "gather": (mine, x, opts, limit),
        "reduce": (x, opts, None, limit),
        "reduce_scatter": (x, inputs, opts, limit),
        "scatter": (x, mine, opts, limit),
    }
    work: Work = call(*arguments.get(name, (x, opts, limit)))
    return work


def record_of(name: str, **fields: Any) -> Any:
    if name in ROOTS:
        fields["rootRank"] = ROOTS[name]
    return RECORDS[name](**fields)


def nobody_comes(rank: int, size: int) -> None:
    """Each operation on a group of its own, because its limit breaks that; all wait at the same time."""
    short, store = timedelta(milliseconds=300), current_store()
    groups = [
        create_group("host", GroupOptions(PrefixStore(f"{name}{form}", store), rank, size, LIMIT))
        for name in RECORDS
        for form in range(2)
    ]
    if rank == 0:
        began = time.monotonic()
        works = []
        for group, name in zip(groups[::2], RECORDS, strict=True):
            works.append((name, issue(group, name, record_of(name, timeout=short))))
        for group, name in zip(groups[1::2], RECORDS, strict=True):
            works.append((name, issue(group, name, ROOTS.get(name), short)))
        for name, work in works:
            with pytest.raises(CollectiveTimeoutError, match=r"within its timeout of 0\.3 s") as info:
                work.wait()
            assert "rank 0 waited for rank 1" in str(info.value), name
        assert time.monotonic() - began < LIMIT.total_seconds() / 2
        store.set("told", "")
    store.wait(["told"])
    for group in groups:
        group.abort()


def test_a_limit_of_an_operation_holds_where_a_rank_never_comes() -> None:
    run_ranks(nobody_comes, 2)


def when_it_returns(group: ProcessGroup) -> None:
    """``asyncOp``: whether the call returns before the operation is done."""
    store = current_store()
    for name in RECORDS:
        if group.rank() == 0:
            work = issue(group, name, record_of(name, asyncOp=True))
            assert not work.is_completed(), name
            store.set(name, "")
        else:
            store.wait([name])
            work = issue(group, name, record_of(name))
        work.wait()
        work = issue(group, name, record_of(name, asyncOp=False))
        assert work.is_completed() or group.name() == "gloo", name  # which has no use for the caller's thread
        work.wait()


def test_a_record_says_when_the_call_returns(backend: str) -> None:
    run_ranks(when_it_returns, 2, backend=backend)


class Fast(Recorder):
    """Notes what takes its fast path, which takes everything."""

    def __init__(self, name: str, **capabilities: object) -> None:
        super().__init__(name, **capabilities)
        self.fast: list[int] = []

    def fast_collective(self, opcode: int, *args: Any, **kwargs: Any) -> Work | None:
        self.fast.append(opcode)
        return COMPLETED


def test_a_record_says_which_device_a_barrier_is_for() -> None:
    groups = {"cpu": Recorder("cpu"), "meta": Recorder("meta", devices=frozenset({"meta"}))}
    group = ProcessGroupByDevice(groups)
    group.barrier(BarrierOptions(device=torch.device("meta")))
    assert [one.calls for one in groups.values()] == [[], ["barrier"]]
    group.barrier()
    group.barrier(BarrierOptions(device=torch.device("cpu")))
    assert [one.calls for one in groups.values()] == [["barrier"] * 2, ["barrier"]]


def test_the_fast_path_is_the_cpus_without_barriers_of_another_group() -> None:
    cpu, meta = Fast("cpu"), Fast("meta", devices=frozenset({"meta"}))
    x = torch.ones(1)
    for groups, path in (
        ({"cpu": cpu, "meta": meta}, [ALL_REDUCE, BARRIER]),
        ({"meta": meta, "cpu": cpu}, [ALL_REDUCE]),
        ({"meta": meta}, []),
    ):
        cpu.fast.clear()
        group = ProcessGroupByDevice(groups)
        works = [group.fast_collective(ALL_REDUCE.opcode, x), group.fast_collective(BARRIER.opcode)]
        assert cpu.fast == [kind.opcode for kind in path]
        assert [work is not None for work in works] == [kind in path for kind in (ALL_REDUCE, BARRIER)]
        assert meta.fast == []


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_a_record_has_no_root_tensor_but_the_first(name: str) -> None:
    group = Recorder("one")
    with pytest.raises(ValueError, match="rootTensor is 1, but there is only tensor 0"):
        issue(group, name, record_of(name, rootTensor=1))
    assert group.calls == []
