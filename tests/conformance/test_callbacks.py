"""Callbacks of futures that wait: for futures, for operations and for each other, at any depth."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.test_works import gate
from harness import current_store, run_ranks
from torch.futures import Future

from collectives import DistBackendError, PrefixStore, ProcessGroup, Work
from collectives.core.types import AllreduceOptions, BarrierOptions
from collectives.registry.backends import GroupOptions, create_group

TURNS = 10


def ones(group: ProcessGroup) -> Work:
    return group.allreduce(torch.ones(3))


def another(group: ProcessGroup) -> ProcessGroup:
    """Returns a second group of the same backend and ranks."""
    options = GroupOptions(
        store=PrefixStore("another", current_store()),
        rank=group.rank(),
        size=group.size(),
        group_name="another",
    )
    return create_group(group.name(), options)


def nest(groups: list[ProcessGroup], depth: int) -> Future[Any]:
    """All-reduces, each issued and waited for in the callback of the one before; the value is the depth."""
    size = groups[0].size()

    def callback(done: Future[Any]) -> int:
        assert done.value()[0].tolist() == [float(size)] * 3
        return 1 + nest(groups[1:] + groups[:1], depth - 1).wait() if depth > 1 else 1

    return ones(groups[0]).get_future().then(callback)


def at_any_depth(group: ProcessGroup) -> None:
    other = another(group)
    for _ in range(TURNS):
        for depth in range(1, 6):
            assert nest([group], depth).wait() == depth
            assert nest([group, other], depth).wait() == depth


def blocking(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(3), AllreduceOptions(asyncOp=False))
    group.barrier(BarrierOptions(asyncOp=False))


def waited(group: ProcessGroup) -> None:
    strided = torch.ones(6)[::2]
    group.allreduce(strided).wait()
    assert strided.tolist() == [float(group.size())] * 3
    group.allreduce_coalesced([torch.ones(2), torch.ones(3)]).wait()
    group.barrier().wait()


def polled(group: ProcessGroup) -> None:
    for work in (ones(group), group.allreduce(torch.ones(6)[::2])):
        while not work.is_completed():
            time.sleep(0.001)
        assert work.is_success()


def collected(group: ProcessGroup) -> None:
    futures = [ones(group).get_future() for _ in range(4)]
    assert len(torch.futures.wait_all(futures)) == 4
    assert group.allreduce_coalesced([torch.ones(2), torch.ones(3)]).get_future().wait()[1].numel() == 3
    assert group.barrier().get_future_result().wait() == 0


def messages(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    got = torch.zeros(2)
    receive = group.recv(got, (me - 1) % size, 3)
    group.send(torch.full((2,), float(me)), (me + 1) % size, 3).get_future().wait()
    assert receive.get_future().wait()[0].tolist() == [float((me - 1) % size)] * 2


def every_wait(group: ProcessGroup) -> None:
    def again(wait: Callable[[ProcessGroup], None], depth: int, _: Any) -> str:
        wait(group)
        return ones(group).get_future().then(partial(again, wait, depth - 1)).wait() if depth else "done"

    for _ in range(TURNS):
        for wait in (blocking, waited, polled, collected, messages):
            assert ones(group).get_future().then(partial(again, wait, 2)).wait() == "done"


def several_at_once(group: ProcessGroup) -> None:
    """All are alike, so that it does not matter which callback issues first on which rank."""
    other = another(group)
    for turn in range(TURNS):
        depth = 1 + turn % 5
        results = [nest([group, other][: 1 + turn % 2], depth) for _ in range(8)]
        assert [result.wait() for result in results] == [depth] * 8


def two_groups(group: ProcessGroup) -> None:
    """The callback of each group blocks in the other one, and ranks run them in different orders."""
    other = another(group)
    groups = [group, other] if group.rank() == 0 else [other, group]

    def block_in(other: ProcessGroup, work: Work) -> None:
        work.get_future().then(lambda _: blocking(other)).wait()

    for _ in range(TURNS):
        works = [ones(one) for one in groups]
        # On threads, as a callback runs at once where the operation is done.
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(block_in, reversed(groups), works))


def of_later_ones(group: ProcessGroup) -> None:
    """A callback waits for futures that are to be completed after its own, or for their callbacks."""
    for depth in range(1, 6):
        works = [ones(group) for _ in range(depth + 1)]
        result = works[-1].get_future().then(lambda _: "last")
        for work in reversed(works[:-1]):
            result = work.get_future().then(lambda _, later=result: later.wait())
        assert result.wait() == "last"
    heard = threading.Event()
    first, second = ones(group), ones(group)
    second.get_future().add_done_callback(lambda _: heard.set())
    assert first.get_future().then(lambda _: heard.wait(30.0)).wait()


def polls_a_later_one(group: ProcessGroup) -> None:
    """A callback that neither sleeps for long nor returns holds up the next for some seconds only."""
    first, second = ones(group).get_future(), ones(group).get_future()

    def until_done(_: Any) -> str:
        while not second.done():
            time.sleep(0.001)
        return "seen"

    assert first.then(until_done).wait() == "seen"


def crossing_messages(group: ProcessGroup) -> None:
    """A callback receives what its peer sends in a later one."""
    following, previous = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    for _ in range(TURNS):
        first, second = (group.recv(torch.zeros(2), previous, tag) for tag in (3, 4))
        got = torch.zeros(2)
        sent = second.get_future().then(lambda _: group.send(torch.ones(2), following, 5).wait())
        received = first.get_future().then(lambda _, got=got: group.recv(got, previous, 5).wait())
        group.barrier().wait()  # a callback that is added when its operation is done runs at once
        for work in [group.send(torch.ones(2), following, tag) for tag in (3, 4)]:
            work.wait()
        assert received.wait()
        assert sent.wait()
        assert got.tolist() == [1.0, 1.0]


BODIES = [
    at_any_depth, every_wait, several_at_once, two_groups, of_later_ones, crossing_messages,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_callbacks_wait(backend: str, body: Callable[[ProcessGroup], None]) -> None:
    run_ranks(body, 2, backend=backend)


@pytest.mark.full
def test_callbacks_poll(backend: str) -> None:
    run_ranks(polls_a_later_one, 2, backend=backend)


def in_order(group: ProcessGroup) -> None:
    """Callbacks that issue collectives, and wait for them, do so one after the other on all ranks."""
    me, size = group.rank(), group.size()
    seen: list[tuple[int, int]] = []

    def twice(n: int, _: Any) -> list[float]:
        values = []
        for place in range(2):
            tensor = torch.full((1000 + n,), float(10 * n + place))
            values.append(group.allreduce(tensor).get_future().wait()[0][0].item())
            group.allreduce(torch.full((n + 1,), 1.0), AllreduceOptions(asyncOp=False))
            seen.append((n, place))
        return values

    for turn in range(TURNS):
        results = [
            group.recv(torch.zeros(1), (me - 1) % size, 7).get_future().then(partial(twice, n))
            for n in range(6)
        ]
        follow = [result.then(lambda _, n=n: seen.append((n, 2))) for n, result in enumerate(results)]
        gate(f"issued {turn}", group)
        for _ in range(6):
            group.send(torch.ones(1), (me + 1) % size, 7).wait()
        for n, result in enumerate(results):
            assert result.wait() == [size * 10.0 * n, size * (10.0 * n + 1)]
        torch.futures.wait_all(follow)
        assert seen == [(n, place) for n in range(6) for place in range(3)]
        seen.clear()


def test_callbacks_of_a_group_run_in_order() -> None:
    run_ranks(in_order, 2, backend="host")


def without_threads(group: ProcessGroup) -> None:
    """No thread begins: for the first future, and for what a callback might wait for."""
    records: list[logging.LogRecord] = []
    logging.getLogger("collectives.futures").addFilter(lambda record: records.append(record) is None)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def pending() -> Work:
        return group.recv(torch.zeros(1), 1 - group.rank(), 7)

    with mock.patch.object(threading.Thread, "start", refuse):
        work = pending()
        for _ in range(2):
            with pytest.raises(DistBackendError, match="no thread could be started for collectives-futures"):
                work.get_future()
        strided = torch.ones(6)[::2]
        unseen = group.allreduce(strided)  # whose last step finds no thread, either
        unseen.wait()
        assert strided.tolist() == [2.0] * 3
    future = work.get_future()
    with mock.patch.object(threading.Thread, "start", refuse):
        several = [pending().get_future() for _ in range(3)]
        gate("asked", group)
        for _ in range(4):
            group.send(torch.ones(1), 1 - group.rank(), 7).wait()
        assert len(torch.futures.wait_all([future, *several])) == 4
    assert "no further thread for futures can be started" in records[0].getMessage()
    assert len(records) == 1
    assert nest([group], 3).wait() == 3


def test_callbacks_without_threads() -> None:
    run_ranks(without_threads, 2, backend="host", isolated=True)
