"""Errors in futures."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch.futures import Future

from collectives import GroupAbortedError, PeerLostError
from collectives.core.work import fail


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
