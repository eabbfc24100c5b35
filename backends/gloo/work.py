"""What torch's ProcessGroupGloo carries out: collectives, and messages, a rank's to itself among them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.futures import Future

from collectives._native import OperationWait
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import as_bytes
from collectives.backends._shared.work import OperationWork
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.recording.flight_record import RecordedOperation
from collectives.core.work import CompletedWork, Work
from collectives.errors import CollectiveTimeoutError, DistBackendError, UnsupportedOperationError
from collectives.threads import start_thread
from collectives.time_limits import seconds_to_wait


class Owner(Protocol):
    """The connections of the group, as its Works use them."""

    where: str
    """Rank and group, to stand in front of a message."""

    def failed(self, operation: Operation, error: Exception) -> Exception:
        """Returns what to raise for an error of Gloo in an operation, after the group took note of it."""

    def check_usable(self, operation: Operation) -> Any:
        """Returns torch's group; raises where this one is broken or ended."""

    def refuse_in_child(self, operation: Operation) -> None:
        """Raises where this is a child that was forked after the operation was issued."""


def begin(owner: Owner, operation: Operation, issue: Callable[[], Any]) -> tuple[Any, RecordedOperation]:
    """Issues an operation; returns Gloo's Work of it and its entry in the flight record.

    Args:
        owner: the connections.
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
        owner: the connections.
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
        owner: the connections.
        inner: Gloo's Work.
        operation: what messages say about it.
        recorded: its entry in the flight record.
        source: sender, where the receive names one; -1 for a receive from any, ``None`` for a send.
        forget: called with this Work when it is done or failed.
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
    ) -> None:
        super().__init__(owner, operation, recorded)
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
        returned: list[Any] = []
        local = isinstance(self._inner, _Receive)
        try:
            left = timedelta(seconds=self._deadline - time.monotonic())
            # Gloo's wait cannot be called again after it returned, so that must not be missed: the handler
            # of a signal that comes meanwhile raises behind this statement, not within it.
            returned.extend(map(self._inner.wait, (_at_least_1_ms(left),)))
        except BaseException as raised:
            if returned:
                interruption = raised
            elif isinstance(raised, RuntimeError) and not local:
                error, interruption = self._failed(raised)
                error.__cause__ = raised
            else:
                self._claim.release()
                self._wait_in_thread()
                raise
        if local and (found := returned[0]) is not None:
            error = found
            if type(found) is RuntimeError:
                error, signalled = self._failed(found)
                interruption = interruption or signalled
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

    def _failed(self, raised: Exception) -> tuple[Exception, BaseException | None]:
        """Returns the error of the message, and what a signal's handler raised while its cause was sought."""
        try:
            return self._owner.failed(self.operation, raised), None
        except BaseException as signalled:  # noqa: BLE001 - returned; the message has failed all the same
            text = f"{self._owner.where} {self.operation}: Gloo failed: {raised}"
            return DistBackendError(text, **self.operation.about), signalled

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
            if isinstance(inner := self._inner, _Receive) and inner.ended.is_set():
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


# ---- messages --------------------------------------------------------------------------------------------


class _Loopback:
    """The queue of one rank's messages to itself, matched by tag in order of issue.

    A send copies the message and is done at once; a receive is done when a message with its tag is there.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._receives: dict[int, deque[_Receive]] = defaultdict(deque)
        self._error: Exception | None = None

    def send(self, message: torch.Tensor, tag: int) -> None:
        """Sends a flat tensor of bytes."""
        copy = message.clone()
        with self._lock:
            self._check()
            if waiting := self._receives[tag]:
                waiting.popleft().deliver(copy)
            else:
                self._messages[tag].append(copy)

    def receive(self, into: torch.Tensor, tag: int, rank: int) -> _Receive:
        """Receives a message of this rank into a flat tensor of bytes."""
        receive = _Receive(into, rank)
        with self._lock:
            self._check()
            if arrived := self._messages[tag]:
                receive.deliver(arrived.popleft())
            else:
                self._receives[tag].append(receive)
        return receive

    def holds(self, tag: int) -> bool:
        """Returns whether a message with this tag waits for its receive."""
        with self._lock:
            return bool(self._messages[tag])

    def abort(self, error: Exception) -> None:
        """Fails all pending receives and all later calls."""
        with self._lock:
            self._error = self._error or error
            pending = [receive for waiting in self._receives.values() for receive in waiting]
            self._receives.clear()
            self._messages.clear()
        for receive in pending:
            receive.end(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _Receive:
    """A receive from the own rank."""

    def __init__(self, into: torch.Tensor, rank: int) -> None:
        self._into = into
        self._rank = rank
        self.ended = threading.Event()
        self._error: Exception | None = None

    def deliver(self, message: torch.Tensor) -> None:
        """Ends the receive with a message."""
        if message.numel() == self._into.numel():
            self._into.copy_(message)
            self.end(None)
            return
        self.end(
            ValueError(
                f"[rank {self._rank}] recv: the message of this rank to itself has {message.numel()} bytes, "
                f"but the tensor to receive it has {self._into.numel()}"
            )
        )

    def end(self, error: Exception | None) -> None:
        """Ends the receive."""
        self._error = error
        self.ended.set()

    def wait(self, timeout: timedelta) -> Exception | None:
        """Blocks until the receive has ended; returns its error, as others are of a signal's handler."""
        return self._error if self.ended.wait(timeout.total_seconds()) else RuntimeError("timed out")


_UNWATCHED_MESSAGES = 64
"""Unpolled messages, before the group polls them."""


class Messages:
    """The messages of one rank that are under way.

    Thread safety: every method may be called from any thread.

    Args:
        owner: the connections; they hold this object, and not the other way round, so that they go with their
            last user and do not wait for the garbage collector.
        rank: the own rank.
        size: number of ranks.
    """

    def __init__(self, owner: Owner, rank: int, size: int) -> None:
        self._group = weakref.ref(owner)
        self._rank = rank
        self._size = size
        self._loopback = _Loopback()
        self._under_way: set[MessageGlooWork] = set()
        self._unwatched: deque[MessageGlooWork] = deque()
        self._awaiting_any: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def _owner(self) -> Owner:
        owner = self._group()
        if owner is None:
            raise RuntimeError("the group of these messages no longer exists")
        return owner

    def __len__(self) -> int:
        """Returns how many messages to and from other ranks are under way."""
        return len(self._under_way)

    def send(self, operation: Operation, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Sends a tensor."""
        message = as_bytes(dense(tensor).cpu())
        if dst != self._rank:
            return self._start(operation, None, lambda inner: inner.send([message], dst, tag))
        self._owner.check_usable(operation)
        with self._lock:
            if self._awaiting_any.get(tag):
                raise UnsupportedOperationError(
                    f"{self._owner.where} {operation}: Gloo cannot give a message of this rank to itself "
                    "to the recv_anysource with this tag that waits already; send first, or receive from "
                    "this rank by number"
                )
        self._loopback.send(message, tag)
        return CompletedWork()

    def receive(self, operation: Operation, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        """Receives a tensor; from any rank when ``src`` is ``None``."""
        staged = dense_outputs([tensor], on_host=True)
        into = as_bytes(staged.stand_ins[0])
        if src == self._rank or (src is None and (self._size == 1 or self._loopback.holds(tag))):
            owner = self._owner
            owner.check_usable(operation)
            local = self._loopback.receive(into, tag, self._rank)
            receive = MessageGlooWork(owner, local, operation, operation.begin(), self._rank)
            if local.ended.is_set():
                receive.wait_until_done()
            return staged.finish(receive)
        if src is not None:
            work = self._start(operation, src, lambda inner: inner.recv([into], src, tag))
            return staged.finish(work)
        with self._lock:
            self._awaiting_any[tag] = self._awaiting_any.get(tag, 0) + 1
        if not into.numel():  # Gloo refuses what is sent already where it has no byte to point at
            into = torch.empty(1, dtype=torch.uint8)
        try:
            work = self._start(operation, -1, lambda inner: inner.recv_anysource([into], tag), tag)
        except BaseException:
            self._arrived_from_any(tag)
            raise
        return staged.finish(work)

    def _arrived_from_any(self, tag: int) -> None:
        with self._lock:
            self._awaiting_any[tag] -= 1

    def _start(
        self,
        operation: Operation,
        source: int | None,
        issue: Callable[[Any], Any],
        any_source_tag: int | None = None,
    ) -> Work:
        inner = self._owner.check_usable(operation)
        started, recorded = begin(self._owner, operation, lambda: issue(inner))

        def forget(done: MessageGlooWork) -> None:
            with self._lock:
                self._under_way.discard(done)
            if any_source_tag is not None:
                self._arrived_from_any(any_source_tag)

        work = MessageGlooWork(self._owner, started, operation, recorded, source, forget)
        with self._lock:
            self._under_way.add(work)
            self._unwatched.append(work)
            oldest = self._unwatched.popleft() if len(self._unwatched) > _UNWATCHED_MESSAGES else None
        if oldest is not None:
            oldest.is_completed()  # where it is not done yet, a thread waits for it from now on
        return work

    def wait_until_done(self) -> None:
        """Blocks until all messages under way are done or failed; raises nothing."""
        with self._lock:
            messages = list(self._under_way)
        for message in messages:
            message.wait_until_done()

    def abort(self, error: Exception) -> None:
        """Fails the receives that wait for a message of this rank to itself."""
        self._loopback.abort(error)

    def release(self) -> None:
        """Drops the messages that nobody watches."""
        self._unwatched.clear()
