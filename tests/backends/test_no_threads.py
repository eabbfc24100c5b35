"""Operations for which no thread of Python begins: they say so, and have not begun."""

from __future__ import annotations

from datetime import timedelta

import torch
from harness import current_store, run_world
from no_threads import threadless

import collectives as dist


def over_gloo(rank: int, size: int) -> None:
    got = torch.empty(3)
    if rank:
        work = dist.irecv(got, 0)
        with threadless(lambda: work.wait(timedelta(seconds=5)), work.is_completed, work.get_future):
            current_store().set("refused", "x")
        assert work.wait(timedelta(seconds=30))
        assert got.tolist() == [1.0] * 3
    else:
        current_store().wait(["refused"])
        dist.send(torch.ones(3), 1)


def test_messages_of_gloo() -> None:
    run_world(over_gloo, 2, backend="gloo", isolated=True)


def profiled(rank: int, size: int) -> None:
    x = torch.ones(3)
    with torch.profiler.profile() as profile:
        with threadless(lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, async_op=True)):
            assert x.tolist() == [1.0] * 3
        dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    events = [event.key for event in profile.key_averages() if event.key.startswith("host:")]
    assert events == ["host:all_reduce"]


def test_operations_that_a_profiler_sees() -> None:
    run_world(profiled, 2, isolated=True)
