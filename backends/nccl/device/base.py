"""What a group needs of a device: streams, events and memory.

A stream is a queue of work on a device, in order and behind the host. The current stream of a thread is where
its tensor operations go. An event is a place in a stream, for which the host and other streams can wait.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from collectives.backends.nccl.device.issuing import Issuing

__all__ = ["Device", "Event", "Stream"]

Stream = Any
"""A stream of some :class:`Device`; compares equal to itself only."""
Event = Any
"""An event of some :class:`Device`."""


class Device(ABC):
    """A device, as far as a group needs to know it.

    Methods may be called from any thread, and do not block unless they say so.

    Args:
        device: the device, with its index where it has one.
    """

    kind: ClassVar[str]
    """Type of the device."""
    _shared: ClassVar[dict[tuple[type[Device], torch.device], Device]] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.issuing = Issuing()
        """Turns of the threads that issue operations of NCCL."""
        self._idle: list[tuple[bool, Stream, Event]] = []
        self._taking = threading.Lock()

    @classmethod
    def shared(cls, device: torch.device) -> Device:
        """Returns the object of a device, the same for all groups of the process."""
        key = cls, device
        if key not in cls._shared:
            cls._shared.setdefault(key, cls(device))
        return cls._shared[key]

    @classmethod
    @abstractmethod
    def of_rank(cls, rank: int) -> torch.device:
        """Returns the device of a global rank, where the ranks of a machine have its devices in order."""

    @staticmethod
    @abstractmethod
    def reduces_float8() -> bool:
        """Returns whether NCCL can compute with 8-bit floats on the calling thread's device."""

    @abstractmethod
    def enter(self) -> Any:
        """Makes this the calling thread's device; returns what :meth:`leave` takes."""

    @abstractmethod
    def leave(self, before: Any) -> None:
        """Makes the device before :meth:`enter` the calling thread's again."""

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Makes this the calling thread's device for the length of a ``with`` block."""
        before = self.enter()
        try:
            yield
        finally:
            self.leave(before)

    @abstractmethod
    def current_stream(self) -> Stream:
        """Returns the calling thread's stream."""

    def take_stream(self, high_priority: bool) -> Stream:
        """Returns an idle stream that nobody else uses until :meth:`give_back`; not one of torch's pool.

        That has 32 streams, which users get in turn: what waits on one of theirs would hold operations back.

        Args:
            high_priority: whether the device is to prefer it.

        Raises:
            RuntimeError: the device has met an error.
        """
        with self._taking, self.activate():
            for place, (priority, stream, end) in enumerate(self._idle):
                if priority == high_priority and self.done(end):
                    del self._idle[place]
                    return stream
            return self._make_stream(high_priority)

    def give_back(self, stream: Stream, high_priority: bool) -> None:
        """Lets others take a stream, as soon as it has passed what it now holds.

        Args:
            stream: the stream.
            high_priority: what it was taken with.
        """
        with self._taking, self.activate():
            self._idle.append((high_priority, stream, self.record(stream)))

    @abstractmethod
    def _make_stream(self, high_priority: bool) -> Stream:
        """Returns a new stream, with the device active; it is never destroyed."""

    @abstractmethod
    def handle(self, stream: Stream) -> int:
        """Returns the number of a stream for NCCL."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Returns an event at the present end of a stream."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Lets what is issued to a stream from now on begin when the event is done."""

    @abstractmethod
    def done(self, event: Event) -> bool:
        """Returns whether a stream has got to the event; called with the device active.

        Raises:
            RuntimeError: the device has met an error.
        """

    @abstractmethod
    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes a stream the calling thread's current one for the length of a ``with`` block."""

    @abstractmethod
    def run(self, stream: Stream, function: Callable[[], object]) -> None:
        """Carries out tensor operations in the order of a stream, without tracking gradients.

        Args:
            stream: the stream.
            function: the operations; called now, or when the stream gets there.
        """

    @abstractmethod
    def empty(self, stream: Stream, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a flat tensor for use on a stream."""

    @abstractmethod
    def share(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Lets a tensor that belongs to another stream live until this one has passed what it now holds."""

    @abstractmethod
    def drop(self, stream: Stream, tensors: list[torch.Tensor]) -> None:
        """Empties a list of tensors that a stream may still use, but that nothing later than it does."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Lets the current stream copy a tensor; returns what it copies to, and the event that it has."""

    @abstractmethod
    def block(self, event: Event) -> None:
        """Blocks until a stream has got to the event, with the GIL released.

        Raises:
            RuntimeError: the device has met an error.
        """

    @abstractmethod
    def future(self) -> torch.futures.Future[Any]:
        """Returns a future whose values may be on this device."""

    @abstractmethod
    def capturing(self) -> bool:
        """Returns whether the calling thread's stream on this device is being captured into a graph."""
