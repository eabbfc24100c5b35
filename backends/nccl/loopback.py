"""Messages of a rank to itself, in the order of streams."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from collectives.backends.nccl.device import CudaDevice, Event, Stream
from collectives.core.arguments.validation import Group, fail
from collectives.errors import UnsupportedOperationError

__all__ = ["Loopback"]


class Loopback:
    """One rank's messages to itself, in order.

    NCCL lets a send to the own rank wait for its receive on the same stream, for ever where that is a later
    call. Here such a message is a copy of the tensor, which the receive copies on; both run on the current
    stream.
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[torch.Tensor, Event]] = deque()
        self._lock = threading.Lock()

    def issue(
        self,
        group: Group,
        device: CudaDevice,
        stream: Stream,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> None:
        """Puts messages that start together on the current stream; those sent are there for those received.

        Raises:
            UnsupportedOperationError: more are received than were sent; nothing is issued.
            ValueError: a message has another size or data type than the tensor to receive it; likewise.
        """
        with self._lock:
            messages = [message for message, _ in self._messages] + list(sent)
            if len(messages) < len(received):
                why = "a message of this rank to itself must be sent before it is received"
                fail(group, "recv", why, UnsupportedOperationError)
            for message, tensor in zip(messages, received, strict=False):
                if (message.numel(), message.dtype) != (tensor.numel(), tensor.dtype):
                    fail(
                        group,
                        "recv",
                        f"the message of this rank to itself is {message.dtype}[{message.numel()}], but the "
                        f"tensor to receive it {tensor.dtype}[{tensor.numel()}]",
                    )
            for tensor in sent:
                copy = device.empty(stream, tensor.numel(), tensor.dtype).view(tensor.shape)
                device.run(stream, partial(copy.copy_, tensor.detach()))
                self._messages.append((copy, device.record(stream)))
            taken = [self._messages.popleft() for _ in received]
        for tensor, (copy, event) in zip(received, taken, strict=True):
            event.wait(stream)
            device.run(stream, partial(tensor.detach().copy_, copy.view(tensor.shape)))
            device.share(stream, copy)
            device.drop([copy])

    def clear(self) -> None:
        """Drops all messages."""
        with self._lock:
            self._messages.clear()
