"""Messages between two ranks of a Gloo group, those of a rank to itself among them."""

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

from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import as_bytes
from collectives.backends.gloo.work import MessageGlooWork, Owner, begin
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.completions import complete_later
from collectives.core.work import CompletedWork, NotifiedWork, Work, settle
from collectives.errors import CollectiveTimeoutError, UnsupportedOperationError
from collectives.time_limits import seconds_to_wait

__all__ = ["Loopback", "Messages", "MessagesOwner"]


class Loopback:
    """The queue of one rank's messages to itself, matched by tag in order of issue.

    A send copies the message and is done at once; a receive is done when a message with its tag is there.

    Thread safety: every method may be called from any thread.

    Args:
        rank: the own rank.
        group: ``id()`` of the group.
    """

    def __init__(self, rank: int, group: int) -> None:
        self._rank = rank
        self._group = group
        self._lock = threading.Lock()
        self._messages: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._receives: dict[int, deque[_Receive]] = defaultdict(deque)
        self._error: Exception | None = None

    def send(self, message: torch.Tensor, tag: int) -> Work:
        """Sends a flat tensor of bytes."""
        copy = message.clone()
        with self._lock:
            self._check()
            waiting = self._receives[tag]
            receive = waiting.popleft() if waiting else None
            if receive is None:
                self._messages[tag].append(copy)
        if receive is not None:
            receive.deliver(copy)
        return CompletedWork()

    def receive(
        self,
        into: torch.Tensor,
        tag: int,
        output: torch.Tensor,
        timeout: timedelta,
        expired: Callable[[], Exception],
    ) -> Work:
        """Receives a message.

        Args:
            into: flat tensor of bytes.
            tag: tag of the message.
            output: the tensor that the Work gives as its result.
            timeout: time limit of the receive.
            expired: makes the error of a receive that passed its limit.
        """
        receive = _Receive(into, output, self._rank, self._group, timeout, expired)
        with self._lock:
            self._check()
            arrived = self._messages[tag]
            message = arrived.popleft() if arrived else None
            if message is None:
                self._receives[tag].append(receive)
        if message is not None:
            receive.deliver(message)
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
            receive.fail(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _Receive(NotifiedWork):
    """A receive from the own rank."""

    def __init__(
        self,
        into: torch.Tensor,
        output: torch.Tensor,
        rank: int,
        group: int,
        timeout: timedelta,
        expired: Callable[[], Exception],
    ) -> None:
        super().__init__()
        self._group = group
        self._into = into
        self._output = output
        self._rank = rank
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._expired = expired
        self._done = threading.Event()
        self._error: Exception | None = None
        self._has_timer = False

    def deliver(self, message: torch.Tensor) -> None:
        """Completes the receive with a message."""
        if message.numel() != self._into.numel():
            self.fail(
                ValueError(
                    f"[rank {self._rank}] recv: the message of this rank to itself has {message.numel()} "
                    f"bytes, but the tensor to receive it has {self._into.numel()}"
                )
            )
            return
        self._end(message, None)

    def fail(self, error: Exception) -> None:
        """Completes the receive with an error, unless it is done."""
        self._end(None, error)

    def _end(self, message: torch.Tensor | None, error: Exception | None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            if message is not None:
                self._into.copy_(message)
            self._error = error
            self._done.set()
        self.tell_end()

    def _expire(self) -> None:
        if not self._done.is_set():
            self.fail(self._expired())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the message is here."""
        left = max(0.0, self._deadline - time.monotonic())
        limit = seconds_to_wait(timeout)
        if 0.0 < limit < left:
            if not self._done.wait(limit):
                raise CollectiveTimeoutError(
                    f"[rank {self._rank}] recv from this rank itself: not done after wait({limit:g} s)",
                    self._rank,
                    operation="recv",
                )
        elif not self._done.wait(left):
            self._expire()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Returns whether the message is here."""
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed receive."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Returns the tensor received."""
        if not self._done.is_set():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        if self._error is not None:
            raise self._error
        return [self._output]

    def source_rank(self) -> int:
        """Returns the own rank."""
        return self._rank if self._done.is_set() else super().source_rank()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the tensor received."""
        future = super().get_future()
        with self._lock:
            if not self._has_timer and not self._done.is_set():
                timer = threading.Timer(max(0.0, self._deadline - time.monotonic()), self._expire)
                timer.daemon = True
                timer.start()
                self._has_timer = True
        return future

    def _has_ended(self) -> bool:
        return self._done.is_set()

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        settle(future, self._error, [self._output])

    def _later(self, complete: Callable[[], None]) -> Callable[[], None]:
        return complete_later(self._number, self._group, complete, collective=False)


_UNWATCHED_MESSAGES = 64
"""Unpolled messages, before the group polls them."""


class MessagesOwner(Owner, Protocol):
    """The part of the group that its messages use."""

    def check_usable(self, operation: Operation) -> Any:
        """Returns torch's group; raises where the group is broken or ended."""


class Messages:
    """The messages of one rank that are under way.

    Thread safety: every method may be called from any thread.

    Args:
        owner: the group; it holds this object, and not the other way round, so that its connections go with
            its last user and do not wait for the garbage collector.
        rank: the own rank.
        size: number of ranks.
    """

    def __init__(self, owner: MessagesOwner, rank: int, size: int) -> None:
        self._group = weakref.ref(owner)
        self._rank = rank
        self._size = size
        self._loopback = Loopback(rank, id(owner))
        self._under_way: set[MessageGlooWork] = set()
        self._unwatched: deque[MessageGlooWork] = deque()
        self._awaiting_any: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def _owner(self) -> MessagesOwner:
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
                    f"{self._owner.where()} {operation}: Gloo cannot give a message of this rank to itself "
                    "to the recv_anysource with this tag that waits already; send first, or receive from "
                    "this rank by number"
                )
        return self._loopback.send(message, tag)

    def receive(
        self, operation: Operation, tensor: torch.Tensor, src: int | None, tag: int, limit: timedelta
    ) -> Work:
        """Receives a tensor; from any rank when ``src`` is ``None``.

        Args:
            operation: what messages of errors say about it.
            tensor: the output.
            src: the sender.
            tag: its tag.
            limit: time limit of a message of this rank to itself.
        """
        staged = dense_outputs([tensor], on_host=True)
        into = as_bytes(staged.stand_ins[0])
        if src == self._rank or (src is None and (self._size == 1 or self._loopback.holds(tag))):
            owner = self._owner  # held until the message is there
            owner.check_usable(operation)

            def expired() -> Exception:
                return owner.failed(operation, CollectiveTimeoutError("timed out"))

            local = self._loopback.receive(into, tag, staged.stand_ins[0], limit, expired)
            return staged.finish(local)
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
        work = MessageGlooWork(self._owner, started, operation, recorded, source, any_source_tag)
        with self._lock:
            self._under_way.add(work)
            self._unwatched.append(work)
            oldest = self._unwatched.popleft() if len(self._unwatched) > _UNWATCHED_MESSAGES else None
        if oldest is not None:
            oldest.is_completed()  # where it is not done yet, a thread waits for it from now on
        return work

    def message_done(self, work: MessageGlooWork) -> None:
        """Forgets a message that is done or failed."""
        with self._lock:
            self._under_way.discard(work)
        if work.any_source_tag is not None:
            self._arrived_from_any(work.any_source_tag)

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
