"""Messages between two ranks of a Gloo group, those of a rank to itself among them."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import as_bytes
from collectives.backends.gloo.work import MessageGlooWork, Owner, begin
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.work import CompletedWork, Work
from collectives.errors import UnsupportedOperationError

__all__ = ["Messages"]


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
    """A receive from the own rank, with the methods that a Work of Gloo's has."""

    def __init__(self, into: torch.Tensor, rank: int) -> None:
        self._into = into
        self._rank = rank
        self._ended = threading.Event()
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
        self._ended.set()

    def has_ended(self) -> bool:
        """Returns whether :meth:`wait` would not block."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> None:
        """Blocks until the receive has ended."""
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._error is not None:
            raise self._error


_UNWATCHED_MESSAGES = 64
"""Unpolled messages, before the group polls them."""


class Messages:
    """The messages of one rank that are under way.

    Thread safety: every method may be called from any thread.

    Args:
        owner: the group; it holds this object, and not the other way round, so that its connections go with
            its last user and do not wait for the garbage collector.
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
                    f"{self._owner.where()} {operation}: Gloo cannot give a message of this rank to itself "
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
            receive = MessageGlooWork(
                owner, local, operation, operation.begin(), self._rank, has_ended=local.has_ended
            )
            if local.has_ended():
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
