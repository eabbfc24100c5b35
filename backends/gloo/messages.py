"""Messages between two ranks of a Gloo group, those of a rank to itself among them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from collectives.backends._shared.operation import Operation
from collectives.backends._shared.tensor_memory import as_bytes
from collectives.backends.gloo.loopback import Loopback
from collectives.backends.gloo.work import MessageGlooWork, Owner, begin
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.work import Work
from collectives.errors import CollectiveTimeoutError, UnsupportedOperationError

__all__ = ["Messages", "MessagesOwner"]

_UNWATCHED_MESSAGES = 64
"""Messages of which nobody has asked whether they are done, before the group does."""


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
        message = as_bytes(dense(tensor))
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
        staged = dense_outputs([tensor])
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
