"""The forms of the operations: with an option record, with its fields and a time limit, under other names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from conformance import table
from harness import current_store, run_ranks
from recorder import Recorder

from collectives import CollectiveTimeoutError, ProcessGroup, ReduceOp, Work
from collectives.core.operations import (
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    Call,
    Operand,
    Operation,
)
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


OPTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": AllreduceOptions,
    "all_reduce_coalesced": AllreduceCoalescedOptions,
    "broadcast": BroadcastOptions,
    "reduce": ReduceOptions,
    "all_gather": AllgatherOptions,
    "all_gather_into_tensor": AllgatherOptions,
    "gather": GatherOptions,
    "scatter": ScatterOptions,
    "reduce_scatter": ReduceScatterOptions,
    "reduce_scatter_tensor": ReduceScatterOptions,
    "all_to_all": AllToAllOptions,
    "all_to_all_single": AllToAllOptions,
    "barrier": BarrierOptions,
}
ME, SIZE = 2, 3


class Kept(Recorder):
    """Keeps the calls that it is to carry out."""

    def issue(self, call: Call) -> Work:
        self.last = call
        return super().issue(call)


def forms(operation: Operation) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], bool]]:
    """Yields what follows the tensors in each form, and whether it asks for a call that returns at once."""
    fields = {"reduceOp": MAX} if operation.reduces else {}
    fields |= {"rootRank": ME} if operation.rooted else {}
    for async_op in (True, False):
        yield (OPTIONS[operation.name](timeout=LIMIT, asyncOp=async_op, **fields),), {}, async_op
    if operation is ALL_REDUCE_COALESCED:
        return  # which has a record alone
    by_name = {"root": ME} if operation.rooted else {}
    by_name |= {"op": MAX} if operation.reduces else {}
    for given in range(len(by_name) + 1):
        names = [*by_name, "timeout"]
        every = {**by_name, "timeout": LIMIT}
        yield tuple(every[one] for one in names[:given]), {one: every[one] for one in names[given:]}, True
    yield (*by_name.values(), LIMIT), {}, True


@pytest.mark.parametrize("name", table.BY_NAME)
def test_every_form_makes_the_same_call(name: str) -> None:
    """With a root that is not 0 and a reduction that is no sum, under every name."""
    operation = table.BY_NAME[name]
    outputs, inputs = table.plain(operation, ME, SIZE, ME)
    tensors = [table.operand(operation.output, outputs), table.operand(operation.input, inputs)]
    tensors = [one for one in tensors if one is not None]
    plainest = [*tensors, [], []] if operation is ALL_TO_ALL_SINGLE else tensors
    nested = [plainest] if operation.output is Operand.PARTS or operation.input is Operand.PARTS else [
        plainest, [one if operation is ALL_REDUCE_COALESCED else [one] for one in plainest],
    ]  # fmt: skip
    for method in operation.methods:
        for operands in nested:
            for more, by_name, async_op in forms(operation):
                group = Kept("kept", ME, SIZE, reductions={torch.float32: frozenset({"MAX"})})
                getattr(group, method)(*operands, *more, **by_name)
                call = group.last
                assert call.operation is operation
                assert (call.timeout, call.async_op) == (LIMIT, async_op), (method, more, by_name)
                assert not operation.reduces or call.op == MAX, (method, more, by_name)
                assert not operation.rooted or call.root == ME, (method, more, by_name)
                for got, given in ((call.outputs, outputs), (call.inputs, inputs)):
                    assert all(one is other for one, other in zip(got, given, strict=True)), method


def root_of(operation: Operation) -> int:
    """Returns a root with which rank 0 waits for rank 1."""
    return int(operation.collective in {"broadcast", "scatter"})


def issue(group: ProcessGroup, operation: Operation, **about: Any) -> Work:
    root = root_of(operation)
    tensors = table.plain(operation, group.rank(), group.size(), root)
    work = table.by_group(group)(operation, *tensors, root=root, **about)
    assert work is not None
    return work


def nobody_comes(rank: int, size: int) -> None:
    """Each operation on a group of its own, because its limit breaks that; all wait at the same time."""
    short, store = timedelta(milliseconds=300), current_store()
    groups = {
        name: create_group("host", GroupOptions(PrefixStore(name, store), rank, size, LIMIT))
        for name in table.BY_NAME
    }
    if rank == 0:
        began = time.monotonic()
        works = {name: issue(group, table.BY_NAME[name], timeout=short) for name, group in groups.items()}
        for name, work in works.items():
            with pytest.raises(CollectiveTimeoutError, match=r"within its timeout of 0\.3 s") as info:
                work.wait()
            assert "rank 0 waited for rank 1" in str(info.value), name
        assert time.monotonic() - began < LIMIT.total_seconds() / 2
        store.set("told", "")
    store.wait(["told"])
    for group in groups.values():
        group.abort()


def test_a_limit_of_an_operation_holds_where_a_rank_never_comes() -> None:
    run_ranks(nobody_comes, 2)


def when_it_returns(group: ProcessGroup) -> None:
    """``async_op``: whether the call returns before the operation is done."""
    store = current_store()
    for name, operation in table.BY_NAME.items():
        if group.rank() == 0:
            work = issue(group, operation)
            assert not work.is_completed(), name
            store.set(name, "")
        else:
            store.wait([name])
            work = issue(group, operation)
        work.wait()
        work = issue(group, operation, async_op=False)
        assert work.is_completed() or group.name() == "gloo", name  # which has no use for the caller's thread
        work.wait()


def test_a_call_says_when_it_returns(backend: str) -> None:
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
        getattr(group, name)(torch.ones(2), OPTIONS[name](rootTensor=1))
    assert group.calls == []
