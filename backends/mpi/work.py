"""Work of the mpi backend: an operation as requests to MPI, and what is to be done between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch.futures import Future

from collectives._native import OperationWait
from collectives.backends._shared.operation import Operation
from collectives.core.completions import complete_later
from collectives.core.recording.flight_record import Recorded
from collectives.core.work import NotifiedWork, settle
from collectives.errors import CollectiveTimeoutError
from collectives.time_limits import seconds_to_wait

__all__ = ["MPIWork", "ProgressEngine", "Steps", "Until"]

Steps = Iterator[list[Any]]
"""Stages of an operation: yields requests to be completed first; an empty list asks to be called again.

A generator cannot go on once the handler of a signal has raised within it; other iterators should.
"""


class Until:
    """The stages of an operation that is over when a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> list[Any]:
        if self._condition():
            raise StopIteration
        return []


class ProgressEngine(Protocol):
    """The part of the engine that Works use."""

    where: str
    """Rank and group, to stand in front of a message."""

    def wait_for(self, work: MPIWork, until: float | None) -> bool:
        """Makes progress until this one has ended; ``False`` where it has not at the time ``until``."""

    def poll(self, work: MPIWork) -> None:
        """Makes progress once, unless another thread does."""

    def watch(self) -> bool:
        """Sees to it that operations end even if nobody waits for them; returns whether that is possible."""


class MPIWork(NotifiedWork):
    """An operation in flight; :meth:`move`, :meth:`complete` and :meth:`fail` are for the engine alone.

    Args:
        engine: the progress engine.
        operation: what messages say about it.
        steps: its stages; none has been begun.
        after: a last local step, such as writing a dense temporary back.
        keep: whatever must stay alive until the operation ends.
        status: MPI's status of a receive, which is one request.
        nbytes: what it moves, to judge how long that may take.
        point_to_point: whether it is a message of the user's, and not a collective.
        recorded: its place in the flight record, where that has it already.
    """

    __slots__ = (
        "_after",
        "_done",
        "_engine",
        "_error",
        "_recorded",
        "_source",
        "_status",
        "_steps",
        "deadline",
        "keep",
        "nbytes",
        "operation",
        "point_to_point",
        "receives",
        "requests",
        "since",
    )

    def __init__(
        self,
        engine: ProgressEngine,
        operation: Operation,
        steps: Steps,
        after: Callable[[], None] | None = None,
        keep: Sequence[Any] = (),
        status: Any = None,
        nbytes: int = 0,
        point_to_point: bool = False,
        recorded: Recorded | None = None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._recorded = recorded or operation.begin()
        self.operation = operation
        self.requests: list[Any] = []
        self._steps: Steps | None = steps
        self._after = after
        self.keep = keep
        self._status = status
        self.receives = status is not None
        self.nbytes = nbytes
        self.point_to_point = point_to_point
        self.since = time.monotonic()
        self.deadline = self.since + operation.timeout.total_seconds()
        self._done = False
        self._error: BaseException | None = None
        self._source: int | None = None

    # ---- for the engine ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins the first stage; called once, before all others."""
        if self._steps is not None:
            self.requests = next(self._steps, [])

    def move(self, testall: Callable[..., bool]) -> bool:
        """Tests the requests and carries out the stages that may be; returns whether all is done."""
        while True:
            if self.requests:
                if self._status is None:
                    if not testall(self.requests):
                        return False
                # It tells the class of an error. One that is over tells nothing more after an interruption.
                elif self.requests[0] and not self.requests[0].Test(self._status):
                    return False
            if self._steps is None:
                break
            try:
                self.requests = next(self._steps)
            except StopIteration:
                self._steps = None
                break
            if not self.requests:
                return False
        if self._after is not None:
            self._after()
            self._after = None
        return True

    @property
    def torn(self) -> bool:
        """Whether a signal's handler raised within a stage that cannot be taken up again."""
        return isinstance(self._steps, GeneratorType) and self._steps.gi_frame is None

    def complete(self) -> None:
        """Ends the operation well."""
        if self._status is not None:
            self._source = self._status.Get_source()
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """Ends the operation with an error; the requests that are still open keep their memory."""
        self._end(error)

    def leave(self, error: BaseException) -> None:
        """Ends the operation in a forked child, where nobody lets go of a lock that was held."""
        self._lock = threading.Lock()
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._steps = None
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
        self._recorded.end(error)

    def _has_ended(self) -> bool:
        return self._done

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        settle(future, self._error, self.operation.outputs)

    def _later(self, complete: Callable[[], None]) -> Callable[[], None]:
        if not self._engine.watch():
            return complete
        return complete_later(self._number, id(self._engine), complete, collective=not self.point_to_point)

    @property
    def done(self) -> bool:
        """Whether it is done or failed, as far as is known."""
        return self._done

    # ---- the contract --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is done; moves it on meanwhile, with the GIL released between looks."""
        limit = seconds_to_wait(timeout)
        if not self._done:
            until = time.monotonic() + limit if limit > 0 else None
            with OperationWait(not self.point_to_point):
                done = self._engine.wait_for(self, until)
            if not done:
                raise CollectiveTimeoutError(
                    f"{self._engine.where} {self.operation}: not done after wait({limit:g} s); it goes on",
                    **self.operation.about,
                )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed; moves it on."""
        if not self._done:
            self._engine.poll(self)
        return self._done

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors."""
        if not self.is_completed():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        if self._error is not None:
            raise self._error
        return list(self.operation.outputs)

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        if not self.receives:
            return super().source_rank()
        if not self.is_completed() or self._source is None:
            raise RuntimeError("the operation is still pending; call wait() before source_rank()")
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs.

        Where MPI takes calls from one thread only, the thread that finds the operation done runs callbacks.
        """
        return super().get_future()
