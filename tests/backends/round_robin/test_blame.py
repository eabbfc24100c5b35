"""Whom errors name when one lane broke and a rank hears of it on another: the cause, not who passed it on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks
from recorder import lanes

from collectives import CollectiveTimeoutError, GroupAbortedError, PeerLostError, ProcessGroup
from collectives.backends.round_robin import ProcessGroupRoundRobin, RoundRobinOptions
from collectives.core.types import AllreduceOptions
from collectives.core.work import CompletedWork, Work
from collectives.errors import DistError

TELLER, VICTIM, LAST = range(3)
LIMIT = timedelta(seconds=1)

Seen = tuple[type[DistError], dict[str, Any], type[DistError] | None, str]


def error_of(call: Callable[[], Any]) -> Seen:
    with pytest.raises(DistError) as info:
        call()
    error = info.value
    return type(error), error.details(), error.cause and type(error.cause), str(error)


def break_first_lane(group: ProcessGroup, how: str) -> None:
    """What the victim does to the first lane, as if it were about to do the same to the others."""
    lane = group.lanes[0]
    if how == "abort":
        try:
            raise KeyError("spoiled")
        except KeyError:
            lane.abort()
    elif how == "leave":
        lane.shutdown()


def hear(group: ProcessGroup, how: str, end: str) -> list[Seen]:
    """The teller hears of it on lane 0, where the last rank is not; that waits on lane 1."""
    store = current_store()
    group.barrier().wait()
    for _ in group.lanes[1:]:
        group.allreduce(torch.ones(30)).wait()
    seen = []
    if group.rank() == VICTIM:
        break_first_lane(group, how)
        store.wait(["heard"])
    elif group.rank() == TELLER:
        store.wait(["waits"])
        options = AllreduceOptions(timeout=LIMIT if how == "late" else None, asyncOp=False)
        seen.append(error_of(lambda: group.allreduce([torch.ones(30)], options).wait()))
        seen.append(error_of(lambda: group.allreduce(torch.ones(30))))
        getattr(group, end)()
    else:
        work = group.lanes[1].allreduce(torch.ones(30))
        store.set("waits", "")
        seen.append(error_of(work.wait))
        seen += [error_of(lambda: group.allreduce(torch.ones(30)).wait()) for _ in range(2)]
        store.set("heard", "")
    return seen


CLASSES: dict[str, tuple[type[DistError], type[DistError], type[DistError] | None]] = {
    "late": (CollectiveTimeoutError, GroupAbortedError, CollectiveTimeoutError),
    "abort": (GroupAbortedError, GroupAbortedError, DistError),
    "leave": (PeerLostError, PeerLostError, None),
}
"""The error of an operation under way, that of a later one, and its cause; as of a single host group."""


@pytest.mark.parametrize("end", ["shutdown", "abort"])
@pytest.mark.parametrize("placement", ["aaa", "abc", "aab", "baa"])
@pytest.mark.parametrize("how", list(CLASSES))
@pytest.mark.sampled(4)
def test_who_hears_of_it_on_another_lane_names_the_cause(how: str, placement: str, end: str) -> None:
    told, _, heard = run_ranks(hear, 3, how, end, backend="round_robin", isolated=True, placement=placement)
    first, later, cause = CLASSES[how]
    assert [kind for kind, *_ in told] == [first, later], told
    kinds = [kind for kind, *_ in heard]  # the second may be under way on lane 0 before news come there
    assert kinds in ([first, later, later], [first, first, later]), heard
    assert all(seen[2] == cause for seen in (told[1], *heard[1:]) if seen[0] is later), (told, heard)
    details = told[0][1]
    assert details["rank"] == VICTIM
    assert (details["operation"], details["sequence"]) == ("", -1) if how == "abort" else ("all_reduce", 2)
    assert (VICTIM in details["missing_ranks"]) == (how == "late")
    assert all(seen[1] == details for seen in [*told, *heard]), (told, heard)
    if how == "abort":
        assert all("KeyError: 'spoiled'" in seen[3] for seen in [*told, *heard]), (told, heard)


@pytest.mark.parametrize("kinds", [("gloo",), ("host", "gloo"), ("gloo", "host")], ids="+".join)
@pytest.mark.parametrize("how", list(CLASSES))
@pytest.mark.sampled(3)
def test_lanes_of_all_kinds_pass_on_the_cause(how: str, kinds: tuple[str, ...]) -> None:
    options = RoundRobinOptions(2, kinds)
    told, _, heard = run_ranks(
        hear, 3, how, "shutdown", backend="round_robin", isolated=True, pg_options=options
    )
    named = -1 if how == "late" and kinds[0] == "gloo" else VICTIM  # Gloo does not tell who is missing
    assert {seen[1]["rank"] for seen in [*told, *heard]} == {named}, (told, heard)
    assert {seen[0] for seen in [*told, *heard]} <= {*CLASSES[how][:2]}, (told, heard)
    if how == "abort":
        assert "KeyError: 'spoiled'" in heard[0][3]


def limit_of_a_message(group: ProcessGroup) -> None:
    if group.rank() == TELLER:
        group.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(CollectiveTimeoutError) as info:
            group.recv([torch.ones(30)], VICTIM).wait()
        assert (info.value.rank, info.value.operation) == (VICTIM, "recv")
        group.set_timeout(timedelta(seconds=60))
    for _ in group.lanes:
        group.allreduce(torch.ones(30)).wait()


def test_a_limit_that_leaves_its_lane_usable_breaks_nothing() -> None:
    run_ranks(limit_of_a_message, 2, backend="round_robin")


def test_lanes_that_know_no_cause_are_aborted_after_an_error_that_says_they_are_broken() -> None:
    some = lanes()

    def lose(call: str) -> Work:
        some[0].calls.append(call)
        if call == "all_reduce":
            raise PeerLostError("rank 1 is lost", 1)
        return CompletedWork()

    some[0]._note = lose
    group = ProcessGroupRoundRobin(some)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="lane 0"):
            group.allreduce(torch.ones(1))
    assert [lane.calls for lane in some] == [["all_reduce", "abort"], ["abort"], ["abort"]]
