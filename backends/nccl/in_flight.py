"""Operations on their way, and the Works that stand for them.

Words. A *flight* is one or more operations that were put on streams together; it has *landed* when its
streams have passed them. The tensors that it *keeps* are used by those streams and must not be freed
before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.futures import Future

from collectives.backends.nccl.device import Device, Event, Stream
from collectives.core.work import Work
from collectives.errors import CollectiveTimeoutError

__all__ = ["Flight", "NcclWork", "Operation", "Owner", "RegionWork", "pause"]

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


def pause(turn: int) -> None:
    """Sleeps between two looks at something that this thread waits for; the longer, the later the turn."""
    time.sleep(min(_FIRST_PAUSE * 2 ** min(turn, 10), _LONGEST_PAUSE))


@dataclass(frozen=True, slots=True)
class Operation:
    """What a message says about an operation.

    Attributes:
        name: name of its user function.
        number: its place among the group's collectives, or among this rank's messages.
        dtype: data type of its tensors; ``None`` where it has none.
        shape: shape of the first.
        count: number of tensors.
        timeout: its time limit.
        detail: what else tells it apart, such as the reduction or the peer.
    """

    name: str
    number: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    count: int
    timeout: timedelta
    detail: str = ""

    def __str__(self) -> str:
        tensor = "" if self.dtype is None else f"{self.dtype} {list(self.shape)}"
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        about = ", ".join(part for part in (self.detail, tensor + more) if part)
        return f"{self.name} #{self.number}" + (f" ({about})" if about else "")


class Flight:
    """Operations on their way, from before they are given to NCCL, which may block.

    Args:
        operation: what messages say; of several operations, the first.
        device: the device.
        peers: the ranks that they need, this one among them or not; ``None`` for all.
        captured: whether they are recorded into a graph, to run when that is replayed: then their events
            tell nothing.
    """

    def __init__(
        self, operation: Operation, device: Device, peers: frozenset[int] | None, captured: bool
    ) -> None:
        self.operation = operation
        self.device = device
        self.peers = peers
        self.captured = captured
        self.streams: tuple[Stream, ...] = ()
        self._origin: Stream | None = None
        self.error: Exception | None = None
        self.began = time.monotonic()
        self._kept: list[torch.Tensor] = []
        self._events: tuple[Event, ...] = ()
        self._issued = False
        self._landed = False

    def issued(self, origin: Stream | None, streams: Sequence[Stream], kept: list[torch.Tensor]) -> None:
        """Notes that the operations are on their streams.

        Args:
            origin: the current stream of the thread that issued them, which their tensors belong to.
            streams: the streams.
            kept: the tensors that the operations use.
        """
        self._origin = origin
        self.streams = tuple(streams)
        self._kept = kept
        self._events = tuple(self.device.record(stream) for stream in self.streams)
        self._issued = True

    @property
    def deadline(self) -> float:
        """When its time limit passes, on the monotonic clock."""
        return self.began + self.operation.timeout.total_seconds()

    def landed(self) -> bool:
        """Returns whether the streams have passed the operations.

        Raises:
            RuntimeError: the device has met an error.
        """
        if not self._landed and self._issued:
            self._landed = self.captured or all(self.device.done(event) for event in self._events)
        return self._landed

    def ended(self) -> bool:
        """Returns whether the operations are done or failed."""
        return self.error is not None or self.landed()

    def hold_back(self, stream: Stream) -> None:
        """Makes a stream wait for the operations, unless they are on it."""
        for own, event in zip(self.streams, self._events, strict=True):
            if own != stream:
                self.device.wait(stream, event)

    @property
    def released(self) -> bool:
        """Whether no tensors are kept any more."""
        return self._issued and not self._kept

    def waited(self, stream: Stream) -> None:
        """Drops the tensors kept if they belong to ``stream``, which waits for the operations.

        Another stream's wait says nothing about the one that they would be given out to again.
        """
        if stream == self._origin:
            self.let_go(stream)

    def let_go(self, stream: Stream) -> None:
        """Drops the tensors kept, in the order of a stream; the operations come before, or have landed."""
        if self._kept:
            kept, self._kept = self._kept, []
            self.device.drop(stream, kept)


class Owner(Protocol):
    """The part of the group that its Works use."""

    def rank(self) -> int:
        """Returns this process's rank within the group."""

    def where(self) -> str:
        """Returns rank and group, to stand in front of a message."""

    def expire(self, flight: Flight) -> None:
        """Fails a flight that passed its time limit."""


class NcclWork(Work):
    """An operation on CUDA streams.

    ``wait`` makes the current stream wait and returns at once, so that an error that the operation meets
    later is raised by the next use of the Work or the group. It blocks the host for a barrier, with a time
    limit, and where the group was made with ``blocking_wait``.

    After ``wait`` the Work counts as completed, because what the caller issues from then on comes after it.

    Args:
        owner: the group.
        flight: the operation on its way.
        outputs: its outputs.
        blocks: whether ``wait`` blocks the host.
        source: sender of a receive.
    """

    def __init__(
        self,
        owner: Owner,
        flight: Flight,
        outputs: Sequence[torch.Tensor],
        blocks: bool = False,
        source: int | None = None,
    ) -> None:
        self._owner = owner
        self._flight = flight
        self._outputs = outputs
        self._blocks = blocks
        self._source = source
        self._waited = False
        self._future: Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the operation, or blocks until it is done; see the class.

        Args:
            timeout: blocks the host at most this long; the operation goes on where it passes.
        """
        limit = timeout.total_seconds() if timeout is not None else 0.0
        if limit > 0.0 or self._blocks:
            self._block(limit)
        self.block_current_stream()
        return True

    def block_current_stream(self) -> None:
        """Makes the current stream wait for the operation."""
        flight = self._flight
        stream = flight.device.current_stream()
        if flight.error is None:
            flight.hold_back(stream)
        if flight.error is not None:
            raise flight.error
        flight.waited(stream)
        self._waited = True

    def _block(self, limit: float) -> None:
        flight = self._flight
        until = time.monotonic() + limit if limit > 0.0 else float("inf")
        turn = 0
        while not flight.ended():
            now = time.monotonic()
            if now >= flight.deadline:
                self._owner.expire(flight)
            elif now >= until:
                raise CollectiveTimeoutError(
                    f"{self._owner.where()} {flight.operation}: not done after wait({limit:g} s); it goes on"
                )
            pause(turn)
            turn += 1

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed, or has been waited for."""
        return self._waited or self._flight.ended()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._flight.error

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors, complete for the stream that waited."""
        if not self.is_completed():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        if self._flight.error is not None:
            raise self._flight.error
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a finished receive."""
        if self._source is None or not self.is_completed():
            return super().source_rank()
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors.

        On CUDA it is completed from the start, in the way of :meth:`wait`: streams of those who use its
        value, callbacks among them, wait for the operation.
        """
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> Future[list[torch.Tensor]]:
        flight, outputs = self._flight, list(self._outputs)
        future: Future[Any] = flight.device.future()

        def complete() -> None:
            if flight.error is not None:
                future.set_exception(flight.error)
            else:
                future.set_result(outputs)

        # One of its own waits for no other flight, but in a capture it would be a branch of the graph that
        # nobody joins again.
        relay = flight.streams[0] if flight.captured else flight.device.new_stream(high_priority=False)
        flight.hold_back(relay)
        flight.device.run(relay, complete)
        return future


class RegionWork(Work):
    """An operation of a coalescing region: a part of what the region becomes at its end.

    Args:
        name: name of its user function.
        device: the device of its tensors.
    """

    def __init__(self, name: str, device: Device) -> None:
        self._name = name
        self._device = device
        self._whole: Work | None = None
        self._outputs: Sequence[torch.Tensor] = ()
        self._source: int | None = None
        self._future: Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def become(self, whole: Work, outputs: Sequence[torch.Tensor], source: int | None) -> None:
        """Ties the operation to the Work of the region."""
        with self._lock:
            self._whole, self._outputs, self._source = whole, outputs, source
            future = self._future
        if future is not None:
            self._follow(whole, future)

    def _ended(self) -> Work:
        if self._whole is None:
            raise RuntimeError(f"this {self._name} is part of a coalescing region; wait after its end")
        return self._whole

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the whole region."""
        return self._ended().wait(timeout)

    def block_current_stream(self) -> None:
        """Makes the current stream wait for the whole region."""
        self._ended().block_current_stream()

    def is_completed(self) -> bool:
        """Returns whether the whole region is done or failed."""
        return self._ended().is_completed()

    def exception(self) -> BaseException | None:
        """Returns the error of the region."""
        return self._ended().exception()

    def result(self) -> list[torch.Tensor]:
        """Returns the outputs of this operation."""
        self._ended().result()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a finished receive."""
        if self._source is None or not self.is_completed():
            return super().source_rank()
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs of this operation, completed with the region; good at once."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = self._device.future()
            whole = self._whole
        if whole is not None:
            self._follow(whole, future)
        return future

    def _follow(self, whole: Work, future: Future[list[torch.Tensor]]) -> None:
        def complete(done: Future[list[torch.Tensor]]) -> None:
            try:
                done.value()
            except Exception as error:  # noqa: BLE001 - handed on
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(list(self._outputs))

        whole.get_future().add_done_callback(complete)
