"""Work of the host backend, and what keeps it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch.futures import Future

import collectives._native as _native
from collectives.core.completions import complete_after
from collectives.core.recording.flight_record import FlightRecord
from collectives.core.work import CollectiveFuture, Work, settle
from collectives.time_limits import seconds_to_wait

_futures_lock = threading.Lock()
"""One for all Works, few of which are asked for a future."""


def as_tuple(operand: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of an operand now, because the caller may change a list of them later."""
    if operand is None:
        return ()
    return (operand,) if isinstance(operand, torch.Tensor) else tuple(operand)


class Owner(Protocol):
    """The group of an operation, as its Work asks it."""

    _native: _native.HostGroup

    @property
    def flight_record(self) -> FlightRecord:
        """The last operations of the group."""


class HostWork(Work):
    """An operation that the core runs in the background.

    Args:
        task: the operation, which keeps its tensors until it is done.
        outputs: its output tensors.
        group: its group, which must stay as long as somebody may wait.
    """

    __slots__ = ("_future", "_group", "_outputs", "_task")

    def __init__(self, task: _native.HostTask, outputs: Sequence[torch.Tensor], group: Owner) -> None:
        self._task = task
        self._outputs = outputs
        self._group = group
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks with the GIL released; a signal handler that raises ends the wait.

        A collective goes on then. A message does where somebody else waits for it or a later one has been
        issued; else it rests, and goes on when somebody waits again or asks.
        """
        seconds = None if timeout is None else seconds_to_wait(timeout) or None
        if not self._task.wait(seconds):
            raise self._group._native.not_done(self._task, seconds or 0.0)
        self._raise_failure()
        return True

    def _rest(self) -> None:
        self._task.rest()

    def _error(self) -> BaseException | None:
        error = self._task.error()
        if error is not None:
            self._group.flight_record.tell_first_error()
        return error

    def _raise_failure(self) -> None:
        error = self._error()
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed; helps a point-to-point operation on."""
        return self._task.poll()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._error()

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors."""
        if not self._task.finished():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        self._raise_failure()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        if not self._task.finished():
            raise RuntimeError("the operation is still pending; call wait() before source_rank()")
        return super().source_rank() if self._task.source < 0 else self._task.source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors."""
        with _futures_lock:
            if self._future is None:
                kind = Future if self._task.is_message else CollectiveFuture
                future: Future[list[torch.Tensor]] = kind()
                if self._task.poll():
                    self._complete(future)
                else:
                    complete_after(self._task, id(self._group), partial(self._complete, future))
                self._future = future
            return self._future

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        settle(future, self._error(), self._outputs)

    @property
    def task(self) -> _native.HostTask:
        """The operation in the core."""
        return self._task
