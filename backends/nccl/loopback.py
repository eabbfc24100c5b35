"""Messages of a rank to itself, in the order of streams.

NCCL lets a send to the own rank wait for its receive on the same stream, for ever where that is a later call.
Here such a message is a copy of the tensor, which the receive copies on.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from collectives.backends.nccl.device import Device, Event
from collectives.core.arguments.validation import fail
from collectives.core.process_group import ProcessGroup
from collectives.core.work import CompletedWork, Work
from collectives.errors import UnsupportedOperationError

__all__ = ["Loopback"]


class Loopback:
    """The queue of one rank's messages to itself, in order. Copies run on the current stream."""

    def __init__(self) -> None:
        self._messages: deque[tuple[torch.Tensor, Event]] = deque()
        self._lock = threading.Lock()

    def send(self, device: Device, tensor: torch.Tensor) -> Work:
        """Copies a tensor."""
        stream = device.current_stream()
        copy = device.empty(stream, tensor.numel(), tensor.dtype).view(tensor.shape)
        device.run(stream, lambda: copy.copy_(tensor))
        with self._lock:
            self._messages.append((copy, device.record(stream)))
        return CompletedWork()

    def receive(self, group: ProcessGroup, device: Device, tensor: torch.Tensor) -> Work:
        """Copies the oldest message into a tensor.

        Raises:
            UnsupportedOperationError: there is none.
            ValueError: it has another size or data type.
        """
        with self._lock:
            if not self._messages:
                fail(
                    group,
                    "recv",
                    "a message of this rank to itself must be sent before it is received",
                    UnsupportedOperationError,
                )
            copy, event = self._messages[0]
            if (copy.numel(), copy.dtype) != (tensor.numel(), tensor.dtype):
                fail(
                    group,
                    "recv",
                    f"the message of this rank to itself is {copy.dtype}[{copy.numel()}], but the tensor to "
                    f"receive it {tensor.dtype}[{tensor.numel()}]",
                )
            self._messages.popleft()
        stream = device.current_stream()
        device.wait(stream, event)
        device.run(stream, lambda: tensor.detach().copy_(copy.view(tensor.shape)))
        device.share(stream, copy)
        device.drop(stream, [copy])
        return CompletedWork([tensor], group.rank())

    def clear(self) -> None:
        """Drops all messages."""
        with self._lock:
            self._messages.clear()
