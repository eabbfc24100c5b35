"""ProcessGroupNCCL over the double of NCCL: values, Works, messages, regions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance import test_time_limits, test_values, test_works
from conformance.oracle import NcclReport, values
from conformance.statements import check_statements
from harness import run_ranks
from nccl_double.device import DoubleDevice
from nccl_double.groups import PROVIDERS, load, make_group, run_over_double

from collectives import DistError, ProcessGroup, ReduceOp, UnsupportedOperationError
from collectives.backends.nccl import ProcessGroupNCCL
from collectives.core.types import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    make_premul_sum,
)


def right_values(group: ProcessGroup, name: str) -> None:
    """All cases on two ranks, on more every third: an odd number, so that calls of both manners run."""
    test_values.right_values(group, name, NcclReport, every=1 if group.size() == 2 else 3)


BODIES: list[Callable[[ProcessGroup], object]] = [
    *(partial(right_values, name=name) for name in test_values.NAMES),
    partial(test_values.special_values, kind=NcclReport),
    test_values.rows_and_stacks,
    test_values.other_tensors,
    test_works.many_in_flight,
    test_works.states,
    test_works.polled,
    test_works.coalesced,
    test_works.shared_memory,
    test_time_limits.numbers,
]

sizes = pytest.mark.parametrize("size", [2, 3, 4], ids=lambda size: f"{size}ranks")


PARTS = 11
"""Tests that share the bodies."""


def conformance(group: ProcessGroup, part: int) -> None:
    group.barrier().wait()  # makes the connections, which blocks; some bodies want to see pending Works
    for body in BODIES[part::PARTS]:
        body(group)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("size", [2, 3])
def test_conformance(nccl_library: Path, size: int, part: int) -> None:
    run_over_double(conformance, size, nccl_library, part, timeout=100)


def in_both_directions(group: ProcessGroup, path: Path) -> None:
    """At once, whichever each rank calls first."""
    me, size = group.rank(), group.size()
    others = [rank for rank in range(size) if rank != me]
    before = load(path).communicators()
    for first in ("send", "recv"):
        outputs = {rank: torch.empty(1009) for rank in others}
        works = []
        for rank in others:
            sent = values(torch.float32, me, 1009, salt=rank)
            calls = [
                lambda s=sent, r=rank: group.send(s, r),
                lambda r=rank, o=outputs: group.recv(o[r], r),
            ]
            works += [call() for call in (calls if first == "send" else reversed(calls))]
        for work in works:
            work.wait()
        for rank in others:
            assert torch.equal(outputs[rank], values(torch.float32, rank, 1009, salt=me))
    assert load(path).communicators() == before + 2 * len(others)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_in_both_directions_at_once(nccl_library: Path, size: int) -> None:
    options = {"pg_options": ProcessGroupNCCL.Options(duplex_messages=True)}
    run_over_double(in_both_directions, size, nccl_library, nccl_library, options=options)


def one_after_the_other(group: ProcessGroup, path: Path) -> None:
    """One communicator is enough for a batch of both directions, and for each direction in turn."""
    double, me, peer = load(path), group.rank(), 1 - group.rank()
    got = torch.zeros(3)
    with group._together():
        group.send(torch.full((3,), float(me)), peer)
        received = group.recv(got, peer)
    received.wait()
    assert got.tolist() == [float(peer)] * 3
    for sender in range(2):
        if sender == me:
            group.send(torch.full((3,), 5.0 + me), peer).wait()
        else:
            group.recv(got, peer).wait()
            assert got.tolist() == [5.0 + peer] * 3
    assert double.communicators() == 1


def test_one_communicator_for_the_messages_of_two_ranks(nccl_library: Path) -> None:
    run_over_double(one_after_the_other, 2, nccl_library, nccl_library)


def both_send_first(group: ProcessGroup) -> str:
    """What the option is for."""
    sent = group.send(torch.ones(3), 1 - group.rank())
    group.recv(torch.ones(3), 1 - group.rank())
    with pytest.raises(DistError) as caught:
        sent.wait(timedelta(seconds=20))
    return str(caught.value)


def test_messages_that_wait_for_each_other(nccl_library: Path) -> None:
    """The error names the way out, on the rank that is first to give up."""
    said = run_over_double(both_send_first, 2, nccl_library, options={"timeout": timedelta(seconds=3)})
    assert any("batch_isend_irecv, or need the option duplex_messages" in each for each in said), said


def unlike(rank: int, size: int, path: Path) -> None:
    options = ProcessGroupNCCL.Options(duplex_messages=rank == 0)
    group = make_group(path, "cupy", rank, size, pg_options=options, timeout=timedelta(seconds=2))
    said = "making" if rank == 0 else "rank 0 makes 2, but this one 1; let duplex_messages be the same"
    with pytest.raises(DistError, match=said):
        group.send(torch.ones(1), 1 - rank)
    group.abort()


def test_ranks_that_chose_differently(nccl_library: Path) -> None:
    run_ranks(unlike, 2, nccl_library, isolated=True)


def messages(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    after, before = (me + 1) % size, (me - 1) % size

    # Many on their way keep their order; an empty one arrives, too.
    with group._together():
        sends = [group.send(torch.full((n % 3,), float(n)), after) for n in range(30)]
        outputs_ = [torch.empty(n % 3) for n in range(30)]
        receives = [group.recv(output, before) for output in outputs_]
        with pytest.raises(RuntimeError, match="after its end"):
            receives[0].wait()
        early = receives[5].get_future()
    for work in [*sends, *receives]:
        work.wait()
    assert [output.tolist() for output in outputs_] == [[float(n)] * (n % 3) for n in range(30)]
    assert receives[3].source_rank() == before
    assert receives[4].result()[0] is outputs_[4]
    assert receives[4].get_future().wait()[0] is outputs_[4]
    assert early.wait()[0] is outputs_[5]

    # Of other layouts.
    strided = torch.zeros(20)[::2]
    with group._together():
        group.send(torch.arange(20.0)[1::2], after)
        receive = group.recv(strided, before)
    receive.wait()
    assert strided.tolist() == [float(n) for n in range(1, 20, 2)]

    # To itself: sent first.
    with pytest.raises(UnsupportedOperationError, match="sent before"):
        group.recv(torch.empty(3), me)
    group.send(torch.full((3,), 7.0), me).wait()
    with pytest.raises(ValueError, match=r"float32\[3\]"):
        group.recv(torch.empty(4), me)
    got = torch.empty(3)
    work = group.recv(got, me)
    work.wait()
    assert (got.tolist(), work.source_rank()) == ([7.0] * 3, me)

    for wrong in (lambda: group.recv_anysource(got), lambda: group.send(got, after, 5)):
        with pytest.raises(UnsupportedOperationError):
            wrong()
    group.barrier().wait()


def interrupted(group: Any, x: torch.Tensor) -> None:
    with group._together():
        group.allreduce(x)
        raise ZeroDivisionError


def several_at_once(group: Any) -> None:
    size = group.size()
    tensors = [torch.ones(3), torch.full((4,), 2.0), torch.zeros(8)[::2], torch.ones(2, dtype=torch.int64)]
    before = group.stats().get("all_reduce", {"count": 0, "bytes": 0})
    work = group.allreduce_coalesced(tensors)
    work.wait()
    after = group.stats()["all_reduce"]
    assert after["count"] - before["count"] == 1, "one operation, of all tensors"
    assert after["bytes"] - before["bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert [tensor.tolist() for tensor in tensors] == [
        [size] * 3, [2.0 * size] * 4, [0.0] * 4, [size] * 2,
    ]  # fmt: skip
    assert [id(tensor) for tensor in work.result()] == [id(tensor) for tensor in tensors]
    group.allreduce_coalesced(tensors[:2], AllreduceCoalescedOptions(asyncOp=False)).wait()
    assert tensors[0].tolist() == [size * size] * 3
    assert group.allreduce_coalesced([]).wait()
    shared = torch.arange(4.0)
    group.allreduce_coalesced([shared, shared[:2], shared[::2]]).wait()
    assert shared.tolist() == [0.0, size, 2.0 * size, 3.0 * size]

    # An error within drops what was called before; nothing is sent, and the ranks stay in step.
    x = torch.ones(2)
    with pytest.raises(UnsupportedOperationError, match="BAND"):
        group.allreduce_coalesced(
            [x, torch.ones(2, dtype=torch.int8)], AllreduceCoalescedOptions(reduceOp=ReduceOp.BAND)
        )
    with pytest.raises(ZeroDivisionError):
        interrupted(group, x)
    assert x.tolist() == [1.0] * 2

    outputs = [torch.empty(size * 2), torch.empty(size)]
    group.all_gather_single_coalesced(outputs, [torch.ones(2), torch.full((1,), 3.0)]).wait()
    assert outputs[0].tolist() == [1.0] * 2 * size
    parts = [torch.empty(2), torch.empty(3)]
    group.reduce_scatter_single_coalesced(parts, [torch.ones(2 * size), torch.ones(3 * size)]).wait()
    assert parts[1].tolist() == [size] * 3
    lists = [[torch.empty(1) for _ in range(size)], [torch.empty(2) for _ in range(size)]]
    group.allgather_coalesced(list(zip(*lists, strict=True)), [torch.ones(1), torch.ones(2)]).wait()
    assert lists[1][size - 1].tolist() == [1.0] * 2


def limits_of_arguments(group: ProcessGroup) -> None:
    """What NCCL cannot do is refused on every rank, before anything is sent."""
    x = torch.ones(4, dtype=torch.int16)
    with pytest.raises(UnsupportedOperationError, match="int16 cannot be reduced"):
        group.allreduce(x)
    with pytest.raises(UnsupportedOperationError, match="AVG is not defined"):
        group.allreduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
    with pytest.raises(UnsupportedOperationError, match="float8_e4m3fnuz"):
        group.allreduce(torch.ones(2).to(torch.float8_e4m3fnuz))
    with pytest.raises(UnsupportedOperationError, match="PRODUCT is not defined"):
        group.allreduce(torch.ones(2, dtype=torch.complex64), ReduceOp.PRODUCT)
    with pytest.raises(UnsupportedOperationError, match="meta"):
        group.allreduce(torch.ones(2, device="meta"))
    work = group.allreduce([torch.ones(2)], AllreduceOptions(asyncOp=False))
    assert work.wait()
    assert work.result()[0].tolist() == [group.size()] * 2
    assert group.barrier(BarrierOptions(device=torch.device("cpu"))).wait()


def barriers(group: Any, path: Path) -> None:
    """A barrier uses the device that the group used first, unless it names another; not that of its rank."""
    double = load(path)
    group.barrier(BarrierOptions(device=torch.device("cpu", 1))).wait()
    first = double.last_call().communicator
    group.allreduce(torch.ones(1)).wait()
    assert double.last_call().communicator != first
    group.barrier().wait()
    assert double.last_call().communicator == first


def test_the_device_of_a_barrier(nccl_library: Path) -> None:
    run_over_double(barriers, 2, nccl_library, nccl_library)


def chosen(group: ProcessGroup, path: Path, config: dict[str, Any], high_priority: bool) -> None:
    """Communicators and streams are made as the options say; a config is read when they are made."""
    group.allreduce(torch.ones(3)).wait()
    assert DoubleDevice.priorities == [high_priority]
    double = load(path)
    told = double.config(double.last_call().communicator)
    told.pop("blocking", None)  # which is NCCL's default anyway
    assert told == config
    with pytest.raises(ValueError, match="blocking=False"):
        ProcessGroupNCCL.NCCLConfig(blocking=False)
    with pytest.raises(ValueError, match="blocking=False"):
        ProcessGroupNCCL.Options().config.blocking = 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_options_reach_nccl(nccl_library: Path, provider: str) -> None:
    config = ProcessGroupNCCL.NCCLConfig(split_share=True)
    config.max_ctas, config.net_name = 3, "Socket"
    passed = {"splitShare": 1, "maxCTAs": 3, "netName": "Socket"}
    for priority, given, expected in ((True, config, passed), (False, ProcessGroupNCCL.NCCLConfig(), {})):
        options = ProcessGroupNCCL.Options(is_high_priority_stream=priority, config=given)
        run_over_double(
            chosen,
            2,
            nccl_library,
            nccl_library,
            expected,
            priority,
            provider=provider,
            options={"pg_options": options},
        )


def scaled_together(group: Any) -> None:
    """One reduction is made for each data type that has elements, not for each tensor."""
    float64, strided = torch.ones(5, dtype=torch.float64), torch.ones(6)[::2]
    tensors = [torch.ones(2), float64, strided, torch.ones(0, dtype=torch.float16), torch.ones(3)]
    communicator = group._communicators.all_ranks(
        DoubleDevice.shared(torch.device("cpu")), group.timeout
    ).communicator
    with mock.patch.object(communicator, "premul_sum", wraps=communicator.premul_sum) as made:
        group.allreduce_coalesced(tensors, AllreduceCoalescedOptions(reduceOp=make_premul_sum(0.5))).wait()
    for tensor in tensors:
        assert tensor.tolist() == [0.5 * group.size()] * tensor.numel()
    assert made.call_count == 2


def several(group: ProcessGroup) -> None:
    for body in (messages, several_at_once, scaled_together, limits_of_arguments):
        body(group)


@pytest.mark.sampled(1)
@sizes
def test_messages_and_several_at_once(nccl_library: Path, size: int) -> None:
    run_over_double(several, size, nccl_library)


def statements_hold(group: ProcessGroup) -> tuple[int, int]:
    return check_statements(group, "cpu", None, NcclReport)


@pytest.mark.full
def test_statements(nccl_library: Path) -> None:
    results = run_over_double(statements_hold, 2, nccl_library, timeout=100)
    assert len(set(results)) == 1
    assert min(results[0]) > 100
