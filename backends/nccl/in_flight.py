"""Operations on CUDA streams: when they have completed, and which tensors they keep until then.

What the host sees of operations in a CUDA graph while that is replayed: a replay calls nothing of ours, and
events that were recorded in a capture tell nothing. So a captured operation writes to memory of the host
where it stands on its stream: its number when NCCL may begin it, and zeros behind it. The host sets a mark
beside the number that it sees, which the zeros take away: where number and mark are still there, the
operation has been under way since.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence

import torch

from collectives.backends._shared.operation import Operation
from collectives.backends.nccl.device import CudaDevice, Event, Stream
from collectives.core.recording.flight_record import RecordedOperation

__all__ = ["PendingOperation", "ReplayedOperation", "Replays", "has_ended", "pause"]

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


def pause(attempt: int) -> None:
    """Sleeps between two polls; longer after more attempts."""
    time.sleep(min(_FIRST_PAUSE * 2 ** min(attempt, 10), _LONGEST_PAUSE))


class PendingOperation:
    """Operations that were enqueued together, from before they are given to NCCL, which may block.

    Args:
        operations: what messages say.
        device: the device.
        peers: the ranks that they need, this one among them or not; ``None`` for all.
        captured: whether they are recorded into a graph, to run when that is replayed: then their events
            tell nothing.
        recorded: their entries in the flight record.

    Attributes:
        operation: the first of them.
        limited: the one whose time limit is the first to pass, and with it that of all.
        error: why the operations failed, once they have.
        released: whether no tensors are kept any more.
        waited: whether a stream that called ``wait`` comes behind them.
    """

    __slots__ = (
        "_completed", "_events", "_issued", "_kept", "_origin", "_recorded", "began", "captured", "device",
        "error", "limited", "operation", "peers", "released", "streams", "waited",
    )  # fmt: skip

    def __init__(
        self,
        operations: Sequence[Operation],
        device: CudaDevice,
        peers: frozenset[int] | None,
        captured: bool,
        recorded: Sequence[RecordedOperation] = (),
    ) -> None:
        self.operation = self.limited = operations[0]
        if len(operations) > 1:
            self.limited = min(operations, key=lambda one: one.timeout)
        self.device = device
        self.peers = peers
        self.captured = captured
        self.streams: tuple[Stream, ...] = ()
        self._origin: Stream | None = None
        self._recorded = recorded
        self.error: Exception | None = None
        self.released = False
        self.waited = False
        self.began = time.monotonic()
        self._kept: list[torch.Tensor] = []
        self._events: tuple[Event, ...] = ()
        self._issued = False
        self._completed = False

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
        self.released = not kept
        self._events = tuple(map(self.device.record, streams))
        self._issued = True

    def fail(self, error: Exception) -> None:
        """Notes why the operations failed."""
        self.error = error
        for operation in self._recorded:
            operation.end(error)

    @property
    def deadline(self) -> float:
        """When its time limit passes, on the monotonic clock."""
        return self.began + self.limited.timeout.total_seconds()

    def completed(self) -> bool:
        """Returns whether the streams have passed the operations.

        Raises:
            RuntimeError: the device has met an error.
        """
        if not self._completed and self._issued:
            if not self.device.is_current():
                with self.device.activate():
                    return self.completed()
            self._completed = self.captured or all(event.done() for event in self._events)
            if self._completed:
                for operation in self._recorded:
                    operation.end()
        return self._completed

    def ended(self) -> bool:
        """Returns whether the operations are done or failed."""
        return self.error is not None or self.completed()

    def block_stream(self, stream: Stream) -> None:
        """Makes the current stream wait for the operations, unless they are on it.

        Drops the tensors kept if they belong to the stream. Another stream's wait says nothing about the one
        that they would be given out to again.
        """
        if not self.device.is_current():
            with self.device.activate():
                self.block_stream(stream)
            return
        for own, event in zip(self.streams, self._events, strict=True):
            if own != stream:
                event.wait(stream)
        if stream == self._origin:
            self.release()

    def release(self) -> None:
        """Drops the tensors kept; the current stream comes behind the operations, or they have completed."""
        if self._kept:
            kept, self._kept = self._kept, []
            self.released = True
            self.device.drop(kept)


def has_ended(pending: PendingOperation) -> bool:
    """Returns whether operations have failed or completed; after an error of the device none completes."""
    try:
        return pending.ended()
    except RuntimeError:
        return False


class ReplayedOperation(PendingOperation):
    """Operations of a graph that is replayed, from when the host first saw them under way.

    They enter the flight record where they fail.

    Args:
        operations: what messages say of those that start together.
        device: the device.
        peers: the ranks that they need; ``None`` for all.
    """

    __slots__ = ("_operations",)

    def __init__(
        self, operations: Sequence[Operation], device: CudaDevice, peers: frozenset[int] | None
    ) -> None:
        self._operations = [operation.replayed() for operation in operations]
        super().__init__(self._operations, device, peers, captured=False)

    def fail(self, error: Exception) -> None:
        """Notes why the operations failed."""
        self._recorded = [operation.begin() for operation in self._operations]
        super().fail(error)


class Replays:
    """The operations of one communicator that are in graphs.

    NCCL carries them out one after the other, in whatever graphs they are. After some thousand, numbers are
    used again.

    Args:
        device: the device.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._zeros, self._addresses = device.numbers()
        self._address = device.take_words()
        self._words = (ctypes.c_int32 * 2).from_address(self._address)
        self._numbers = itertools.cycle(range(1, len(self._addresses)))
        self._known: dict[int, tuple[Sequence[Operation], frozenset[int] | None]] = {}
        self._number = 0
        self._under_way: ReplayedOperation | None = None

    def begin(self, stream: Stream, operations: Sequence[Operation], peers: frozenset[int] | None) -> None:
        """Lets a stream that is captured tell that operations begin."""
        number = next(self._numbers)
        self._known[number] = operations, peers
        self._device.copy(self._address, self._addresses[number], 4, stream)

    def end(self, stream: Stream) -> None:
        """Lets it tell that they are done."""
        self._device.copy(self._address, self._zeros, 8, stream)

    def poll(self) -> ReplayedOperation | None:
        """Returns the operations that are under way; the same object as long as they are.

        To be called often by one thread: what began and ended between two calls is not seen.
        """
        number, marked = self._words
        if number == 0:
            self._words[1] = 0
            self._under_way = None
        elif not marked or self._under_way is None or number != self._number:
            self._words[1] = 1
            self._number = number
            operations, peers = self._known[number]
            self._under_way = ReplayedOperation(operations, self._device, peers)
        return self._under_way
