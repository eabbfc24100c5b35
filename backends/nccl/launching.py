"""From requests to flights: puts operations on streams.

Words. A *request* is an operation that a member has called. Requests of a *region* of a thread are kept until
its end and then launched as one flight, with one event for each stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from collectives.backends.nccl.communicators import Channel, Communicators
from collectives.backends.nccl.device import Device, Stream
from collectives.backends.nccl.failures import Failures
from collectives.backends.nccl.in_flight import Flight, NcclWork, Operation, Owner, RegionWork
from collectives.backends.nccl.library.codes import NcclError
from collectives.backends.nccl.library.interface import NcclLibrary
from collectives.backends.nccl.steps import Steps
from collectives.backends.nccl.watchdog import Watchdog
from collectives.core.work import CompletedWork, Work

__all__ = ["Launcher", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """An operation that a member has called.

    Attributes:
        operation: what messages say about it.
        device: the device of its tensors.
        plan: gives it its steps.
        outputs: its outputs.
        async_op: whether it runs apart from the current stream.
        peer: the other rank of a message; ``None`` for a collective.
        sends: whether the message goes out.
        blocks: whether its Work's ``wait`` blocks the host.
    """

    operation: Operation
    device: Device
    plan: Callable[[Steps], None]
    outputs: Sequence[torch.Tensor]
    async_op: bool = True
    peer: int | None = None
    sends: bool = False
    blocks: bool = False

    @property
    def source(self) -> int | None:
        """The sender of a receive."""
        return None if self.sends else self.peer


class _Region:
    """Requests kept back by one thread."""

    def __init__(self) -> None:
        self.requests: list[tuple[Request, RegionWork]] = []


class Launcher:
    """Launches the requests of one group.

    Args:
        library: NCCL.
        communicators: the group's communicators.
        failures: what ends the group.
        watchdog: watches the flights.
        owner: the group, for its Works.
        blocking: whether every Work's ``wait`` blocks the host.
    """

    def __init__(
        self,
        library: NcclLibrary,
        communicators: Communicators,
        failures: Failures,
        watchdog: Watchdog,
        owner: Owner,
        blocking: bool,
    ) -> None:
        self._library = library
        self._communicators = communicators
        self._failures = failures
        self._watchdog = watchdog
        self._owner = owner
        self._blocking = blocking
        self._unreleased: dict[tuple[Stream, ...], deque[Flight]] = {}
        self._releasing = threading.Lock()
        self._regions = threading.local()

    def submit(self, request: Request) -> Work:
        """Launches a request, or keeps it back in the region that is open on this thread."""
        self._failures.refuse(request.operation)
        region: _Region | None = getattr(self._regions, "open", None)
        if region is None:
            return self._launch([request])
        work = RegionWork(request.operation.name, request.device)
        region.requests.append((request, work))
        return work

    @contextmanager
    def region(self) -> Iterator[list[Work]]:
        """Keeps requests of this thread back, and launches them as one at the end; drops them after an error.

        Yields:
            A list that holds the Work of the whole after the end. A region within another one belongs to
            that.

        Raises:
            ValueError: the requests are on different devices.
        """
        if getattr(self._regions, "open", None) is not None:
            yield []
            return
        region = self._regions.open = _Region()
        result: list[Work] = []
        try:
            yield result
        finally:
            self._regions.open = None
        if not region.requests:
            result.append(CompletedWork())
            return
        whole = self._launch([request for request, _ in region.requests])
        for request, work in region.requests:
            work.become(whole, request.outputs, request.source)
        result.append(whole)

    def _launch(self, requests: list[Request]) -> NcclWork:
        first = requests[0]
        device = first.device
        if any(request.device is not device for request in requests):
            named = ", ".join(sorted({str(request.device.device) for request in requests}))
            raise ValueError(
                f"{self._owner.where()} operations that start together are on several devices: {named}"
            )
        captured = device.capturing()
        if not captured:
            self._release()
        peers = frozenset(request.peer for request in requests if request.peer is not None)
        everyone = any(request.peer is None for request in requests)
        channels = self._channels(requests)
        flight = Flight(first.operation, device, None if everyone else peers, captured)
        with self._watched(flight), device.issuing, device.activate():
            self._failures.refuse(first.operation)
            self._issue(requests, channels, flight)
        with self._releasing:
            self._unreleased.setdefault(flight.streams, deque()).append(flight)
        outputs = [tensor for request in requests for tensor in request.outputs]
        blocks = self._blocking or any(request.blocks for request in requests)
        return NcclWork(self._owner, flight, outputs, blocks, first.source)

    @contextmanager
    def _watched(self, flight: Flight) -> Iterator[None]:
        """Lets the watchdog watch calls of NCCL, which may block; an error of theirs breaks the group."""
        self._watchdog.watch(flight)
        try:
            yield
        except NcclError as error:
            flight.error = self._failures.of_call(flight, error)
            raise flight.error from error
        except BaseException as error:
            if flight.error is None:
                flight.error = RuntimeError(f"{flight.operation}: not issued, because {error}")
            raise

    @contextmanager
    def _connecting(self, request: Request, peer: int) -> Iterator[None]:
        """Stands around the calls that connect this rank with another one for a message."""
        flight = Flight(request.operation, request.device, frozenset({peer}), False)
        with self._watched(flight):
            yield
            flight.issued(None, (), [])

    def _channels(self, requests: list[Request]) -> list[Channel]:
        """Returns the channel of each request; makes missing ones in an order that all ranks keep."""
        found: dict[tuple[int | None, bool], Channel] = {}

        def order(request: Request) -> tuple[int, int]:
            if request.peer is None:
                return -1, -1
            low, high = sorted((self._owner.rank(), request.peer))
            return low, high

        for request in sorted(requests, key=order):
            key = request.peer, request.sends
            limit = request.operation.timeout
            if key in found:
                continue
            if request.peer is None:
                found[key] = self._communicators.whole(request.device, limit)
            else:
                connecting = self._connecting(request, request.peer)
                pair = self._communicators.pair(request.device, request.peer, limit, connecting)
                found[key] = pair.outgoing if request.sends else pair.incoming
        return [found[request.peer, request.sends] for request in requests]

    def _issue(self, requests: list[Request], channels: list[Channel], flight: Flight) -> None:
        """Puts the requests on their streams; with the device's lock held."""
        device = flight.device
        current = device.current_stream()
        on_current = not any(request.async_op for request in requests)
        placed: list[tuple[Stream, Steps]] = []
        for channel in channels:
            stream = current if on_current else channel.stream
            placed.append((stream, Steps(device, stream, channel.communicator)))
        streams = list(dict.fromkeys(stream for stream, _ in placed))
        if not on_current:
            start = device.record(current)
            for stream in streams:
                device.wait(stream, start)
        for request, (_, steps) in zip(requests, placed, strict=True):
            request.plan(steps)
        for stream, steps in placed:
            _run(device, stream, steps.before)
        self._call([steps for _, steps in placed])
        for stream, steps in placed:
            _run(device, stream, steps.after)
        flight.issued(current, streams, [tensor for _, steps in placed for tensor in steps.kept])

    def _call(self, placed: list[Steps]) -> None:
        calls = [call for steps in placed for call in steps.calls]
        with self._library.group() if len(calls) > 1 else nullcontext():
            for call in calls:
                call()
        for steps in placed:
            steps.clean()

    def _release(self) -> None:
        """Lets go of the tensors of flights that have landed and that no stream waited for.

        Those of the same streams land in order, so that each look ends at the first that has not.
        """
        landed: list[Flight] = []
        with self._releasing:
            for streams, flights in list(self._unreleased.items()):
                with suppress(RuntimeError):  # the device's error: the watchdog sees to it
                    while flights and (flights[0].released or flights[0].landed()):
                        landed.append(flights.popleft())
                if not flights:
                    del self._unreleased[streams]
        for flight in landed:
            flight.let_go(flight.streams[0])


def _run(device: Device, stream: Stream, functions: list[Callable[[], object]]) -> None:
    if functions:
        device.run(stream, lambda: [function() for function in functions])
