"""Works of a composition, of one lane and of a barrier over all, and errors that name their lane."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from collectives.core.work import CoalescedWork, Work, WrappedWork, chain, fail
from collectives.errors import CollectiveMismatchError, DistError
from collectives.time_limits import seconds_to_wait

__all__ = ["BarrierWork", "LaneWork", "name_lane"]

_PARTS = re.compile(r"(\[rank \d+\] )?(.*)", re.DOTALL)
"""The rank in front of a message, where it is there, and the rest."""

Failed = Callable[[DistError], None]
"""Handles an error of a lane: names the lane in it, and breaks the composition where it must."""


def name_lane(error: DistError, lane: int, composition: str) -> None:
    """Adds the lane to the message of an error, once, behind the rank; keeps its number as ``error.lane``.

    Args:
        error: what a lane raised.
        lane: number of the lane, from 0.
        composition: the whole group in words.
    """
    if not hasattr(error, "lane"):
        error.lane = lane  # type: ignore[attr-defined]
        rank, text = _PARTS.findall(str(error))[0]
        error.args = (f"{rank}lane {lane} of {composition}: {text}", *error.args[1:])


class LaneWork(WrappedWork):
    """The Work of a lane, whose error the composition handles.

    Args:
        inner: the lane's Work.
        failed: called with its error, wherever that is seen first; may be called again with it.
    """

    __slots__ = ("_failed", "_future")

    def __init__(self, inner: Work, failed: Failed) -> None:
        super().__init__(inner)
        self._failed = failed
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for this operation; those of other lanes may still go on."""
        try:
            return self._inner.wait(timeout)
        except DistError as error:
            # A limit given to wait() may have passed, while the operation goes on or has just got done.
            if self._inner.exception() is not None:
                self._failed(error)
            raise

    def exception(self) -> BaseException | None:
        """Returns the error of the operation."""
        error = self._inner.exception()
        if isinstance(error, DistError):
            self._failed(error)
        return error

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs."""
        if self._future is None:
            future = self._inner.get_future()
            # On CUDA it is done from the start, and a callback would put a stream of torch's between.
            done_well = future.done() and self._inner.exception() is None
            self._future = future if done_well else chain(future, self._outcome)
        return self._future

    def _outcome(self, done: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        try:
            return done.value()
        except DistError as error:
            self._failed(error)
            raise


class BarrierWork(Work):
    """A barrier that begins on one lane, and covers the others when all ranks have called it there.

    A rank that calls something else does so on that first lane, where both get an error. The others are still
    in step then. But a collective that is issued meanwhile comes behind the barrier on its own lane, which
    the barrier must have reached before that: :meth:`cover`.

    Args:
        first: the barrier of the first lane.
        issue_others: issues those of the other lanes, without blocking.
        broken: called with a mismatch that leaves the lanes out of step.
    """

    def __init__(
        self,
        first: Work,
        issue_others: Callable[[], Sequence[Work]],
        broken: Callable[[CollectiveMismatchError], None],
    ) -> None:
        self._first = first
        self._issue_others = issue_others
        self._broken = broken
        self._others: CoalescedWork | None = None
        self._error: BaseException | None = None
        # A future that is done calls back inside of cover(), and an abort out of it.
        self._lock = threading.RLock()
        self._future: Future[Any] | None = None
        first.get_future().add_done_callback(self._first_done)

    def cover(self) -> None:
        """Goes on to the other lanes now, unless it has, or the first has failed."""
        with self._lock:
            if self._others is not None or self._error is not None:
                return
            if self._first.is_completed() and self._first.exception() is not None:
                return
            try:
                self._others = CoalescedWork(self._issue_others())
            except DistError as error:
                self._error = error

    def _first_done(self, done: Future[Any]) -> None:
        """Covers the other lanes, also where nobody waits."""
        try:
            done.value()
        except Exception as error:  # noqa: BLE001 - every wait() raises it
            self._note(error)
        else:
            self.cover()

    def _note(self, error: BaseException) -> None:
        with self._lock:
            out_of_step = self._others is not None
        if out_of_step and isinstance(error, CollectiveMismatchError):
            self._broken(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the barriers of all lanes."""
        limit = seconds_to_wait(timeout)
        deadline = time.monotonic() + limit
        try:
            self._first.wait(timeout)
            self.cover()
            if self._others is None:
                raise self._error  # type: ignore[misc]  # cover() has set one of the two
            left = max(1e-3, deadline - time.monotonic())  # not zero, which would be no limit
            return self._others.wait(timedelta(seconds=left) if limit > 0.0 else None)
        except CollectiveMismatchError as error:
            self._note(error)
            raise

    def is_completed(self) -> bool:
        """Returns whether the barriers of all lanes are done, or one has failed."""
        if not self._first.is_completed():
            return False
        self.cover()
        return self._others is None or self._others.is_completed()

    def exception(self) -> BaseException | None:
        """Returns the error of a lane."""
        others = self._others
        return self._first.exception() or self._error or (None if others is None else others.exception())

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of an empty list."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                self._first.get_future().add_done_callback(self._wait_for_others)
            return self._future

    def _wait_for_others(self, done: Future[Any]) -> None:
        self.cover()
        if self._others is None:
            self._complete(done)
        else:
            self._others.get_future().add_done_callback(self._complete)

    def _complete(self, _: Future[Any]) -> None:
        error = self.exception()
        if self._future is not None:
            if error is None:
                self._future.set_result([])
            else:
                fail(self._future, error)
