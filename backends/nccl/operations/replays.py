"""What the host sees of operations in a CUDA graph while that is replayed.

A replay calls nothing of ours, and events that were recorded in a capture tell nothing. So a captured
operation writes to memory of the host where it stands on its stream: its number when NCCL may begin it, and
zeros behind it. The host sets a mark beside the number that it sees, which the zeros take away: where number
and mark are still there, the operation has been under way since.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

from collectives.backends._shared.operation import Operation
from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.operations.in_flight import PendingOperation

__all__ = ["ReplayedOperation", "Replays"]


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
            self._under_way = ReplayedOperation(*self._about(number))
        return self._under_way

    def _about(self, number: int) -> tuple[Sequence[Operation], CudaDevice, frozenset[int] | None]:
        operations, peers = self._known[number]
        return operations, self._device, peers
