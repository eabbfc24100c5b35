"""How the composition of several groups ends: aborts, limits, errors of a lane."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks
from recorder import lanes

from collectives import CollectiveMismatchError, CollectiveTimeoutError, GroupAbortedError, ProcessGroup
from collectives.backends.round_robin import ProcessGroupRoundRobin, RoundRobinOptions
from collectives.core.work import Work


def abort_all(group: ProcessGroup) -> list[str]:
    seen = []
    if group.rank() == 1:
        current_store().wait(["aborted"])
    else:
        works = [group.allreduce(torch.ones(3)) for _ in range(4)]
        threading.Timer(0.2, group.abort).start()
        for work in works:
            with pytest.raises(GroupAbortedError) as info:
                work.wait()
            seen.append(type(info.value).__name__)
        with pytest.raises(GroupAbortedError):
            group.allreduce(torch.ones(3))
        current_store().set("aborted", "")
    return seen


@pytest.mark.parametrize("lane", ["host", "gloo"])
def test_abort_ends_all_lanes(lane: str) -> None:
    options = RoundRobinOptions(3, lane)
    results = run_ranks(abort_all, 2, backend="round_robin", pg_options=options, isolated=True)
    assert results[0] == ["GroupAbortedError"] * 4


def peek(group: ProcessGroup) -> None:
    if group.rank() == 1:
        current_store().wait(["passed"])
    x = torch.ones(3)
    work = group.allreduce(x)
    if group.rank() == 0:
        with pytest.raises(CollectiveTimeoutError):
            work.wait(timedelta(milliseconds=50))
        current_store().set("passed", "")
    work.wait()
    assert x.tolist() == [2.0] * 3
    group.allreduce(x).wait()


@pytest.mark.parametrize("lane", ["host", "gloo"])
def test_a_limit_of_wait_breaks_nothing(lane: str) -> None:
    run_ranks(peek, 2, backend="round_robin", pg_options=RoundRobinOptions(3, lane))


class Closing(Work):
    """An operation that gets done just when a limit of wait() has passed."""

    def __init__(self) -> None:
        self.done = False

    def wait(self, timeout=None):
        self.done = True
        raise CollectiveTimeoutError("not done yet; it goes on")

    def is_completed(self):
        return self.done

    def exception(self):
        return None

    def result(self):
        return []

    def get_future(self):
        raise NotImplementedError


def test_an_operation_done_just_after_a_limit_of_wait_breaks_nothing() -> None:
    some = lanes()
    some[0]._note = lambda _: Closing()
    group = ProcessGroupRoundRobin(some)
    with pytest.raises(CollectiveTimeoutError):
        group.allreduce(torch.ones(1)).wait(timedelta(seconds=1))
    group.allreduce(torch.ones(1)).wait()
    assert some[1].calls == ["all_reduce"]


def test_what_only_a_lane_refuses_takes_no_turn() -> None:
    some = lanes()
    group = ProcessGroupRoundRobin(some)
    group.allreduce(torch.ones(1))
    note, some[1]._note = some[1]._note, lambda _: int("x")
    with pytest.raises(ValueError, match="invalid literal"):
        group.allreduce(torch.ones(1))
    some[1]._note = note
    group.allreduce(torch.ones(1))
    assert [lane.calls for lane in some] == [["all_reduce"], ["all_reduce"], []]


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_a_lane_that_fails_to_end_keeps_none_from_ending(end: str) -> None:
    some = lanes()

    def fail() -> None:
        raise OSError("first")

    setattr(some[0], end, fail)
    with pytest.raises(OSError, match="first"):
        getattr(ProcessGroupRoundRobin(some), end)()
    assert [lane.calls for lane in some] == [[], [end], [end]]


def limit_in_a_future(group: ProcessGroup) -> str:
    """The first to hear of the limit is the lane's own thread, where the lanes are aborted then."""
    group.barrier().wait()
    if group.rank() == 1:
        current_store().wait(["ended"])
        return ""
    seen, heard = [], threading.Event()

    def callback(done: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            done.value()
        except CollectiveTimeoutError as error:
            seen.append(str(error))
        heard.set()

    work = group.allreduce(torch.ones(3), timeout=timedelta(seconds=1))
    other = group.allreduce(torch.ones(3))
    work.get_future().add_done_callback(callback)
    assert heard.wait(30)
    with pytest.raises((CollectiveTimeoutError, GroupAbortedError), match="lane 2 of round_robin"):
        other.wait()
    with pytest.raises(GroupAbortedError, match="lane 1"):  # the barrier had lane 0
        group.allreduce(torch.ones(3))
    current_store().set("ended", "")
    return seen[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lane", ["host", "gloo"])
def test_a_limit_seen_by_a_future_breaks_all_lanes(lane: str) -> None:
    options = RoundRobinOptions(3, lane)
    told, _ = run_ranks(limit_in_a_future, 2, backend="round_robin", isolated=True, pg_options=options)
    assert "lane 1 of round_robin group" in told


def limit_of_a_barrier(group: ProcessGroup) -> float:
    group.barrier().wait()
    if group.rank() == 1:
        current_store().wait(["passed"])
        group.barrier().wait()
        return 0.0
    work, began = group.barrier(), time.monotonic()
    with pytest.raises(CollectiveTimeoutError):
        work.wait(timedelta(seconds=1))
    took = time.monotonic() - began
    current_store().set("passed", "")
    work.wait()
    return took


def test_a_limit_of_wait_is_that_of_all_lanes_together() -> None:
    """Each of 30 lanes would take a second of its own."""
    options = RoundRobinOptions(30, "host")
    took, _ = run_ranks(limit_of_a_barrier, 2, backend="round_robin", pg_options=options)
    assert took < 20


def sum_up(group: ProcessGroup, x: torch.Tensor) -> None:
    for _ in group.lanes:
        group.allreduce(x).wait()


def barrier_in_between(group: ProcessGroup) -> None:
    """Rank 0 has more on the way behind its barrier, which is on all lanes then."""
    x = torch.ones(3)
    if group.rank() == 0:
        barrier, after = group.barrier(), group.allreduce(x)
        current_store().set("issued", "")
        with pytest.raises(CollectiveMismatchError, match=r"(?s)lane 0 of round_robin group .*barrier"):
            barrier.wait()
        assert isinstance(barrier.exception(), CollectiveMismatchError)
        with pytest.raises((CollectiveMismatchError, GroupAbortedError)):
            after.wait()
        with pytest.raises(GroupAbortedError, match=r"is broken; first cause: .*lane 0 of"):
            group.barrier()
        current_store().set("seen", "")
        return
    current_store().wait(["issued"])
    with pytest.raises(CollectiveMismatchError, match=r"(?s)lane 0 of round_robin group .*barrier"):
        group.broadcast(x).wait()
    current_store().wait(["seen"])
    with pytest.raises((CollectiveMismatchError, GroupAbortedError)):
        group.allreduce(x).wait()
    with pytest.raises(GroupAbortedError):
        sum_up(group, x)


def test_a_barrier_that_met_something_else_before_what_follows_it_breaks_the_lanes() -> None:
    run_ranks(barrier_in_between, 2, backend="round_robin", isolated=True)


def barriers_in_flight(group: ProcessGroup) -> None:
    """Barriers among collectives, none of them waited for; the ranks come at different times."""
    works = []
    for turn in range(30):
        x = torch.full((2,), float(turn))
        works.append((turn, group.allreduce(x)))
        if turn % 4 == group.rank():
            time.sleep(0.005)
        if turn % 3:
            works.append((None, group.barrier()))
    futures = [work.get_future() for _, work in works]
    for (turn, work), future in zip(works, futures, strict=True):
        found = future.wait()
        assert work.is_success()
        assert [tensor.tolist() for tensor in found] == ([] if turn is None else [[2.0 * turn] * 2])
        assert [tensor.tolist() for tensor in work.result()] == [tensor.tolist() for tensor in found]
    # One that nobody holds and one behind it that polls.
    group.barrier()
    work = group.barrier()
    while not work.is_completed():
        time.sleep(0.001)
    group.barrier()
    group.shutdown()


def test_barriers_in_flight() -> None:
    run_ranks(barriers_in_flight, 2, backend="round_robin")
