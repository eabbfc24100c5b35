"""The Works of operations that a library carries out and Python watches."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.futures import Future

from collectives.backends._shared.operation import Operation
from collectives.core.completions import complete_later, next_operation
from collectives.core.recording.flight_record import Recorded
from collectives.core.work import CollectiveFuture, Work, settle
from collectives.errors import CollectiveTimeoutError


class _Owner(Protocol):
    where: str
    """Rank and group, to stand in front of a message."""


class OperationWork(Work):
    """An operation carried out in Python, whose owner reports its end.

    Args:
        owner: the group, or what stands for it.
        operation: what messages say about it; its outputs are the result.
        recorded: its entry in the flight record.
    """

    __slots__ = ("_asked", "_error", "_lock", "_number", "_owner", "_recorded", "operation")

    def __init__(self, owner: _Owner, operation: Operation, recorded: Recorded) -> None:
        self._owner = owner
        self.operation = operation
        self._recorded = recorded
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._number = next_operation()
        # The future and what has it completed. Together, as a signal's handler may raise at any time.
        self._asked: tuple[Future[list[torch.Tensor]], Callable[[], None] | None] | None = None

    @abstractmethod
    def _has_ended(self) -> bool:
        """Returns whether the operation has ended, as far as is known, with ``_error`` or without."""

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._error if self.is_completed() else None

    def _results(self) -> list[torch.Tensor]:
        return list(self.operation.outputs)

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors."""
        with self._lock:
            if self._asked is None:
                kind = Future if self.operation.is_message else CollectiveFuture
                future: Future[list[torch.Tensor]] = kind()
                if self._has_ended():
                    self._complete(future)
                    self._asked = (future, None)
                else:
                    self._asked = (future, self._later(partial(self._complete, future)))
            return self._asked[0]

    def tell_end(self) -> None:
        """Has the future completed; called after the end, without locks, perhaps several times."""
        with self._lock:
            asked = self._asked
            if asked is None or asked[1] is None:
                return
            self._asked = (asked[0], None)
        asked[1]()

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        settle(future, self._error, self.operation.outputs)

    def _later(self, complete: Callable[[], None]) -> Callable[[], None]:
        """Returns what has ``complete`` called."""
        collective = not self.operation.is_message
        return complete_later(self._number, id(self._owner), complete, collective=collective)

    def _not_done(self, limit: float) -> CollectiveTimeoutError:
        """Returns the error of a wait whose own limit, in seconds, has passed."""
        return CollectiveTimeoutError(
            f"{self._owner.where} {self.operation}: not done after wait({limit:g} s); it goes on",
            **self.operation.about,
        )
