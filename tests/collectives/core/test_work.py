"""Errors in futures, and futures that several threads ask for."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.futures import Future

from collectives import GroupAbortedError, PeerLostError
from collectives.backends.round_robin.group import LaneWork
from collectives.core.work import CoalescedWork, CompletedWork, Work, fail


class Held:
    """Stands for tensors and groups in the frames that an error was raised through."""


def fail_through_frames(future: Future[object]) -> weakref.ref[Held]:
    held = Held()
    try:
        try:
            raise PeerLostError("rank 1 is lost", 1)
        except PeerLostError as first:
            raise GroupAbortedError("broken", 1, cause=first) from first
    except GroupAbortedError as error:
        fail(future, error)
    return weakref.ref(held)


def test_a_future_holds_no_frame_of_its_error() -> None:
    future: Future[object] = Future()
    held = fail_through_frames(future)
    gc.collect()
    assert held() is None
    for _ in range(2):
        with pytest.raises(GroupAbortedError, match=r"^broken$") as info:
            future.wait()
        assert info.value.rank == 1
        assert isinstance(info.value.cause, PeerLostError)
        assert isinstance(info.value.__cause__, PeerLostError)


class Asked(CompletedWork):
    """Two threads are on their way to its future before one has it."""

    def __init__(self) -> None:
        super().__init__([torch.ones(1)])
        self._both = threading.Barrier(2)

    def result(self) -> list[torch.Tensor]:
        self._both.wait(10)
        return super().result()


class AskedInside(CompletedWork):
    def __init__(self) -> None:
        super().__init__()
        self._both, self._not_done = threading.Barrier(2), Future[Any]()

    def get_future(self) -> Future[Any]:
        self._both.wait(10)
        return self._not_done


@pytest.mark.parametrize(
    "make",
    [Asked, lambda: CoalescedWork([AskedInside()]), lambda: LaneWork(AskedInside(), lambda _: None)],
    ids=["completed", "coalesced", "of a lane"],
)
def test_all_threads_get_the_same_future(make: Callable[[], Work]) -> None:
    work = make()
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: work.get_future(), range(2))
    assert one is other
