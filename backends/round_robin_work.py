"""The Work of one lane of a composition, and errors that tell the lane."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.futures import Future

from collectives.errors import DistError
from collectives.work import Work, chain

__all__ = ["LaneWork", "tell_lane"]

_PARTS = re.compile(r"(\[rank \d+\] )?(.*)", re.DOTALL)
"""The rank in front of a message, where it is there, and the rest."""

Failed = Callable[[DistError], None]
"""Takes note of an error of a lane: names the lane in it, and breaks the composition where it must."""


def tell_lane(error: DistError, lane: int, composition: str) -> None:
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


class LaneWork(Work):
    """The Work of a lane; the composition hears of its error.

    Args:
        inner: the lane's Work.
        failed: called with its error, wherever that is seen first; may be called again with it.
    """

    __slots__ = ("_failed", "_future", "_inner")

    def __init__(self, inner: Work, failed: Failed) -> None:
        self._inner = inner
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

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed."""
        return self._inner.is_completed()

    def exception(self) -> BaseException | None:
        """Returns the error of the operation."""
        error = self._inner.exception()
        if isinstance(error, DistError):
            self._failed(error)
        return error

    def result(self) -> list[torch.Tensor]:
        """Returns the outputs."""
        return self._inner.result()

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        return self._inner.source_rank()

    def block_current_stream(self) -> None:
        """Makes the current CUDA stream wait for the operation."""
        self._inner.block_current_stream()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs."""
        if self._future is None:
            self._future = chain(self._inner.get_future(), self._outcome)
        return self._future

    def _outcome(self, done: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        try:
            return done.value()
        except DistError as error:
            self._failed(error)
            raise
