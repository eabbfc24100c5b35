"""The composition of several groups."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks

from collectives import CollectiveTimeoutError, GroupAbortedError, ProcessGroup
from collectives.backends.loopback import Loopback
from collectives.backends.round_robin import (
    ProcessGroupRoundRobin,
    RoundRobinOptions,
    round_robin_process_groups,
)
from collectives.capabilities import Capabilities
from collectives.registry import GroupOptions, create_group
from collectives.types import AllreduceOptions
from collectives.work import CompletedWork, Work


class Recorder(ProcessGroup):
    """A group that notes what it is asked to do."""

    def __init__(self, name: str, rank: int = 0, size: int = 2, **capabilities: object) -> None:
        super().__init__(rank, size, group_name=name)
        self.calls: list[str] = []
        self._can = Capabilities(
            **{
                "devices": frozenset({"cpu"}),
                "reductions": {torch.float32: frozenset({"SUM", "MAX"})},
                **capabilities,
            }
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._can

    def name(self) -> str:
        return "recorder"

    def _note(self, call: str) -> Work:
        self.calls.append(call)
        return CompletedWork()

    def _broadcast(self, tensor, opts):
        return self._note("broadcast")

    def _allreduce(self, tensor, opts):
        return self._note("allreduce")

    def _allgather(self, outputs, tensor, opts):
        return self._note("allgather")

    def _send(self, tensor, dst, tag):
        return self._note("send")

    def _recv(self, tensor, src, tag):
        return self._note("recv")

    def _barrier(self, opts):
        return self._note("barrier")

    def abort(self) -> None:
        self._note("abort")

    def shutdown(self) -> None:
        self._note("shutdown")


def lanes(**capabilities: object) -> list[Recorder]:
    return [Recorder(name, **capabilities) for name in "abc"]


def test_collectives_take_turns_messages_stay_and_barriers_cover_all() -> None:
    a, b, c = recorders = lanes()
    group = ProcessGroupRoundRobin(recorders)
    x = torch.zeros(2)
    for _ in range(4):
        group.allreduce(x)
    group.broadcast(x)
    group.send(x, 1)
    group.recv(x, 1)
    group.barrier().wait()
    group.shutdown()
    assert a.calls == ["allreduce", "allreduce", "send", "recv", "barrier", "shutdown"]
    assert b.calls == ["allreduce", "broadcast", "barrier", "shutdown"]
    assert c.calls == ["allreduce", "barrier", "shutdown"]


def test_wrong_arguments_take_no_turn() -> None:
    a, b, _ = recorders = lanes()
    group = ProcessGroupRoundRobin(recorders)
    with pytest.raises(NotImplementedError):
        group.allreduce(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="root is 2"):
        group.broadcast(torch.zeros(2), root=2)
    group.allreduce(torch.zeros(2))
    assert a.calls == ["allreduce"]
    assert b.calls == []


def test_coalesced_operations_spread_over_the_lanes() -> None:
    recorders = lanes()
    ProcessGroupRoundRobin(recorders).allreduce_coalesced([torch.zeros(1)] * 3).wait()
    assert [lane.calls for lane in recorders] == [["allreduce"]] * 3


def test_capabilities_are_those_that_all_lanes_have() -> None:
    f32, i32 = torch.float32, torch.int32
    first = Recorder("a", reductions={f32: frozenset({"SUM", "MAX"}), i32: frozenset({"SUM"})}, tags=False)
    second = Recorder(
        "b",
        reductions={f32: frozenset({"SUM"})},
        operations=frozenset({"all_reduce", "barrier"}),
        moves=frozenset({f32}),
        uneven=False,
    )
    can = ProcessGroupRoundRobin([first, second]).capabilities
    assert can.reductions == {f32: frozenset({"SUM"})}
    assert can.moves == {f32}
    assert not can.uneven
    assert not can.tags
    assert can.operations == {"all_reduce", "barrier", "send", "recv", "recv_anysource"}


def test_wrong_groups_are_refused() -> None:
    a, b, c = lanes()
    with pytest.raises(ValueError, match="empty"):
        round_robin_process_groups([])
    with pytest.raises(ValueError, match="groups 0 and 2 are the same group 'a'"):
        round_robin_process_groups([a, b, a])
    with pytest.raises(ValueError, match=r"size is 2 in group 0 \('a'\) and 3 in group 1 \('x'\)"):
        round_robin_process_groups([a, Recorder("x", size=3)])
    with pytest.raises(ValueError, match=r"rank is 0 in group 0 .* and 1 in group 1"):
        round_robin_process_groups([a, Recorder("x", rank=1)])
    with pytest.raises(ValueError, match=r"devices is \['cpu'\] in group 0 .* and \['cuda'\]"):
        round_robin_process_groups([a, Recorder("x", devices=frozenset({"cuda"}))])
    with pytest.raises(TypeError, match=r"entry 1 .* Loopback"):
        round_robin_process_groups([c, Loopback(0)])


def test_names_and_limits() -> None:
    group = round_robin_process_groups(lanes())
    assert group.group_name == "a+b+c"
    assert group.describe() == "round_robin group 'a+b+c' of 2 over 3 recorder lanes"
    group.set_timeout(timedelta(seconds=7))
    assert [lane.timeout for lane in group.lanes] == [timedelta(seconds=7)] * 3
    assert group.timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"lanes": 3}, TypeError, "must be RoundRobinOptions, but are of type dict"),
        (RoundRobinOptions(lanes=0), ValueError, "lanes must be an int of at least 1, but is 0"),
        (RoundRobinOptions(lanes=True), ValueError, "but is True"),
        (RoundRobinOptions(backend="round_robin"), ValueError, "cannot be round-robin groups"),
        (RoundRobinOptions(backend="nothing"), ValueError, "unknown backend 'nothing'; known are"),
    ],
)
def test_wrong_options_are_refused(given: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_group("round_robin", GroupOptions(None, 0, 1, pg_options=given))


def bits_on_lanes(group: ProcessGroup, count: int) -> list[bytes]:
    torch.manual_seed(group.rank())
    values = [torch.randn(count) for _ in range(4)]
    works = [group.allreduce(value) for value in values]
    for work in reversed(works):
        work.wait()
    return [value.numpy().tobytes() for value in values]


@pytest.mark.parametrize("lane", ["host", "gloo"])
@pytest.mark.parametrize("count", [1, 1009, 50_000])
def test_bits_are_those_of_one_lane(lane: str, count: int) -> None:
    one = run_ranks(bits_on_lanes, 3, count, backend=lane)
    three = run_ranks(bits_on_lanes, 3, count, backend="round_robin", pg_options=RoundRobinOptions(3, lane))
    assert one == three
    assert one[0] == one[1] == one[2]


def compose(rank: int, size: int) -> list[float]:
    store = current_store()
    groups = []
    for name in ("host", "gloo"):
        prefix = torch.distributed.PrefixStore(name, store)
        groups.append(create_group(name, GroupOptions(prefix, rank, size, group_name=name)))
    group = round_robin_process_groups(groups)
    results = []
    for value in range(4):
        x = torch.tensor([float(value)])
        group.allreduce(x).wait()
        results.append(x.item())
    group.monitored_barrier(timedelta(seconds=10))
    group.shutdown()
    return results


def test_groups_of_different_kinds_compose() -> None:
    assert run_ranks(compose, 2) == [[0.0, 2.0, 4.0, 6.0]] * 2


def abort_all(group: ProcessGroup) -> list[str]:
    seen = []
    if group.rank() == 1:
        time.sleep(1.0)
    else:
        works = [group.allreduce(torch.ones(3)) for _ in range(4)]
        threading.Timer(0.2, group.abort).start()
        for work in works:
            with pytest.raises(GroupAbortedError) as info:
                work.wait()
            seen.append(type(info.value).__name__)
        with pytest.raises(GroupAbortedError):
            group.allreduce(torch.ones(3))
    return seen


@pytest.mark.parametrize("lane", ["host", "gloo"])
def test_abort_ends_all_lanes(lane: str) -> None:
    options = RoundRobinOptions(3, lane)
    results = run_ranks(abort_all, 2, backend="round_robin", pg_options=options, isolated=True)
    assert results[0] == ["GroupAbortedError"] * 4


def expire(group: ProcessGroup) -> None:
    if group.rank() == 1:
        time.sleep(1.5)
        return
    work = group.allreduce(torch.ones(3), AllreduceOptions(timeout=timedelta(milliseconds=300)))
    with pytest.raises(CollectiveTimeoutError):
        work.wait()
    # The turn is another lane's, but the group is broken as a whole.
    with pytest.raises(GroupAbortedError, match="first cause"):
        group.allreduce(torch.ones(3))


@pytest.mark.parametrize("lane", ["host", "gloo"])
def test_a_limit_that_passes_breaks_all_lanes(lane: str) -> None:
    run_ranks(expire, 2, backend="round_robin", pg_options=RoundRobinOptions(3, lane), isolated=True)


def peek(group: ProcessGroup) -> None:
    if group.rank() == 1:
        time.sleep(0.5)
    x = torch.ones(3)
    work = group.allreduce(x)
    if group.rank() == 0:
        with pytest.raises(CollectiveTimeoutError):
            work.wait(timedelta(milliseconds=50))
    work.wait()
    assert x.tolist() == [2.0] * 3
    group.allreduce(x).wait()


@pytest.mark.parametrize("lane", ["host", "gloo"])
def test_a_limit_of_wait_breaks_nothing(lane: str) -> None:
    run_ranks(peek, 2, backend="round_robin", pg_options=RoundRobinOptions(3, lane))
