"""Works over those of torch's ProcessGroupGloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.futures import Future

from collectives._native import OperationWait
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.work import OperationWork
from collectives.core.recording.flight_record import RecordedOperation
from collectives.errors import CollectiveTimeoutError, DistError
from collectives.threads import start_thread
from collectives.time_limits import seconds_to_wait

__all__ = ["CollectiveGlooWork", "MessageGlooWork", "Owner", "begin"]


class Owner(Protocol):
    """The part of the group that its Works use."""

    def failed(self, operation: Operation, error: Exception) -> Exception:
        """Returns what to raise for an error of Gloo in an operation, after the group took note of it."""

    def where(self) -> str:
        """Returns rank and group, to stand in front of a message."""

    def check_usable(self, operation: Operation) -> Any:
        """Returns torch's group; raises where this one is broken or ended."""

    def refuse_in_child(self, operation: Operation) -> None:
        """Raises where this is a child that was forked after the operation was issued."""


def begin(owner: Owner, operation: Operation, issue: Callable[[], Any]) -> tuple[Any, RecordedOperation]:
    """Issues an operation; returns Gloo's Work of it and its entry in the flight record.

    Args:
        owner: the group.
        operation: what messages say about it.
        issue: hands it to Gloo.
    """
    recorded = operation.begin()
    try:
        return issue(), recorded
    except RuntimeError as error:
        failure = owner.failed(operation, error)
        recorded.end(failure)
        raise failure from error


def _at_least_1_ms(timeout: timedelta) -> timedelta:
    """Gloo counts whole milliseconds, and takes none as "no limit"."""
    return max(timeout, timedelta(milliseconds=1))


class CollectiveGlooWork(OperationWork):
    """A collective; Gloo's own Work knows when it is done.

    Args:
        owner: the group.
        inner: Gloo's Work.
        operation: what messages say about it.
        recorded: its entry in the flight record.
    """

    _owner: Owner

    def __init__(self, owner: Owner, inner: Any, operation: Operation, recorded: RecordedOperation) -> None:
        super().__init__(owner, operation, recorded)
        self._inner = inner
        self._noted = False
        self._watched = False

    def watch(self) -> None:
        """Lets the group learn of an error at once, also where nobody waits."""
        if not self._watched:
            self._inner.get_future().add_done_callback(self._note)
            self._watched = True

    def _note(self, done: Future[Any]) -> None:
        """Takes the outcome from Gloo's future, which is done a moment before Gloo's Work says that it is."""
        try:
            done.value()
        except RuntimeError as error:
            self._failure(error)
        else:
            self._recorded.end()
        self._noted = True
        self.tell_end()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the collective is done."""
        limit = seconds_to_wait(timeout)
        self._owner.refuse_in_child(self.operation)
        if self._noted:  # perhaps within a callback, for which Gloo's Work waits
            if self._error is not None:
                raise self._error
            return True
        try:
            if limit:
                self._wait_at_most(limit)
            else:
                with OperationWait(True):
                    self._inner.wait()
        except CollectiveTimeoutError:
            raise
        except RuntimeError as error:
            raise self._failure(error) from error
        self._recorded.end()
        return True

    def _wait_at_most(self, limit: float) -> None:
        try:
            self._inner.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            if not self.is_completed():
                raise self._not_done(limit) from error
            self._inner.wait()

    def _failure(self, error: Exception) -> BaseException:
        # Without the lock: the group may run callbacks of users, who may ask this Work.
        found = self._error or self._owner.failed(self.operation, error)
        with self._lock:
            failure = self._error = self._error or found
        failure.__cause__ = failure.__cause__ or error
        self._recorded.end(failure)
        return failure

    def is_completed(self) -> bool:
        """Returns whether the collective is done or failed."""
        return self._noted or bool(self._inner.is_completed())

    def exception(self) -> BaseException | None:
        """Returns the error of a failed collective."""
        if self._noted or not self.is_completed():
            return self._error
        try:
            self._inner.wait()
        except RuntimeError as error:
            return self._failure(error)
        self._recorded.end()
        return None

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors."""
        self.watch()
        return super().get_future()

    def _has_ended(self) -> bool:
        return self._noted


class MessageGlooWork(OperationWork):
    """A send or a receive; Gloo finds out that it is done only inside its ``wait``.

    The first thread that waits calls that. Where nobody waits but somebody asks (:meth:`is_completed`,
    :meth:`get_future`, a wait with a limit), a thread of its own does. A limit is never given to Gloo's wait,
    because Gloo breaks all connections of the group when it passes; only the operation's own limit does that.

    Args:
        owner: the group.
        inner: Gloo's Work.
        operation: what messages say about it.
        recorded: its entry in the flight record.
        source: sender, where the receive names one; -1 for a receive from any, ``None`` for a send.
        forget: called with this Work when it is done or failed.
        has_ended: whether ``inner``'s wait returns at once, where that can be told.
    """

    _owner: Owner

    def __init__(
        self,
        owner: Owner,
        inner: Any,
        operation: Operation,
        recorded: RecordedOperation,
        source: int | None,
        forget: Callable[[MessageGlooWork], None] = lambda _: None,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(owner, operation, recorded)
        self._inner_has_ended = has_ended
        self._forget = forget
        self._inner: Any = inner
        self._source = source
        self._deadline = time.monotonic() + operation.timeout.total_seconds()
        self._claim = threading.Lock()
        self._done = threading.Event()
        self._has_waiter = False

    def wait_until_done(self) -> None:
        """Blocks until the message is done or failed; raises nothing but what a signal's handler does."""
        if not self._claim.acquire(blocking=False):
            self._done.wait()
            return
        error: Exception | None = None
        interruption: BaseException | None = None
        returned: list[bool] = []
        try:
            left = timedelta(seconds=self._deadline - time.monotonic())
            # Gloo's wait cannot be called again after it returned, so that must not be missed: the handler
            # of a signal that comes meanwhile raises behind this statement, not within it.
            returned.extend(map(self._inner.wait, (_at_least_1_ms(left),)))
        except BaseException as raised:
            if returned:
                interruption = raised
            elif isinstance(raised, (DistError, ValueError)):  # of a message of this rank to itself
                error = raised
            elif isinstance(raised, RuntimeError):
                error = self._owner.failed(self.operation, raised)
                error.__cause__ = raised
            else:
                self._claim.release()
                self._wait_in_thread()
                raise
        if returned and self._source == -1:
            self._source = int(self._inner._source_rank())  # the public name is deprecated
        self._inner = None  # it holds the connections
        self._recorded.end(error)
        self._error = error
        self._done.set()
        self._forget(self)
        self.tell_end()
        if interruption is not None:
            raise interruption

    def _has_ended(self) -> bool:
        return self._done.is_set()

    def _ensure_waited(self) -> None:
        """Lets a thread wait for the message, unless one does."""
        with self._lock:
            if not self._has_waiter and not self._done.is_set():
                self._wait_in_thread()
                self._has_waiter = True

    def _wait_in_thread(self) -> None:
        start_thread(self.wait_until_done, f"gloo {self.operation.name}")

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the message is done."""
        limit = seconds_to_wait(timeout)
        self._owner.refuse_in_child(self.operation)
        if limit:
            self._ensure_waited()
            if not self._done.wait(limit):
                raise self._not_done(limit)
        else:
            self.wait_until_done()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Returns whether the message is done or failed."""
        if not self._done.is_set():
            if self._inner_has_ended():
                self.wait_until_done()
            else:
                self._ensure_waited()
        return self._done.is_set()

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        if self._source is None or not self.is_completed() or self._error is not None:
            return super().source_rank()
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the tensor received; of a send, of nothing."""
        future = super().get_future()
        self._ensure_waited()
        return future
