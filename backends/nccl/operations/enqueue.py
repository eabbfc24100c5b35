"""Puts operations on CUDA streams: each as it is called, or those of a coalescing region as one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from collectives.backends._shared.operation import Operation
from collectives.backends.nccl.communicators import Communicators, StreamedCommunicator
from collectives.backends.nccl.device import Device, Stream
from collectives.backends.nccl.failures import Failures
from collectives.backends.nccl.libnccl.codes import NcclError
from collectives.backends.nccl.libnccl.interface import NcclLibrary
from collectives.backends.nccl.operations.in_flight import PendingOperation
from collectives.backends.nccl.operations.nccl_calls import CallSequence
from collectives.backends.nccl.watchdog import Watchdog
from collectives.backends.nccl.work import CoalescedOperationWork, NcclWork, Owner
from collectives.core.work import CompletedWork, Work

__all__ = ["Enqueuer", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """An operation that a member has called.

    Attributes:
        operation: what messages say about it.
        device: the device of its tensors.
        add_calls: adds its copies and calls of NCCL to a sequence.
        outputs: its outputs.
        async_op: whether it runs apart from the current stream.
        peer: the other rank of a message; ``None`` for a collective.
        sends: whether the message goes out.
        blocks: whether its Work's ``wait`` blocks the host.
    """

    operation: Operation
    device: Device
    add_calls: Callable[[CallSequence], None]
    outputs: Sequence[torch.Tensor]
    async_op: bool = True
    peer: int | None = None
    sends: bool = False
    blocks: bool = False

    @property
    def source(self) -> int | None:
        """The sender of a receive."""
        return None if self.sends else self.peer


class Enqueuer:
    """Enqueues the requests of one group.

    Args:
        library: NCCL.
        communicators: the group's communicators.
        failures: what ends the group.
        watchdog: watches pending operations.
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
        self._unreleased: dict[tuple[Stream, ...], deque[PendingOperation]] = {}
        self._releasing = threading.Lock()
        self._coalescing = threading.local()

    def submit(self, request: Request) -> Work:
        """Enqueues a request, or keeps it back in the coalescing region that is open on this thread."""
        self._failures.refuse(request.operation)
        kept: list[tuple[Request, CoalescedOperationWork]] | None = getattr(self._coalescing, "kept", None)
        if kept is None:
            return self._enqueue([request])
        work = CoalescedOperationWork(request.operation.name, request.device)
        kept.append((request, work))
        return work

    @contextmanager
    def coalescing(self) -> Iterator[list[Work]]:
        """Keeps requests of this thread back, enqueues them as one at the end, and drops them after an error.

        Yields:
            A list that holds the Work of the whole after the end. An inner region belongs to the outer one.

        Raises:
            ValueError: the requests are on different devices.
        """
        if getattr(self._coalescing, "kept", None) is not None:
            yield []
            return
        kept: list[tuple[Request, CoalescedOperationWork]] = []
        self._coalescing.kept = kept
        result: list[Work] = []
        try:
            yield result
        finally:
            self._coalescing.kept = None
        if not kept:
            result.append(CompletedWork())
            return
        whole = self._enqueue([request for request, _ in kept])
        for request, work in kept:
            work.bind(whole, request.outputs, request.source)
        result.append(whole)

    def _enqueue(self, requests: list[Request]) -> NcclWork:
        first = requests[0]
        device = first.device
        if any(request.device is not device for request in requests):
            named = ", ".join(sorted({str(request.device.device) for request in requests}))
            raise ValueError(
                f"{self._owner.where()} operations that start together are on several devices: {named}"
            )
        captured = device.capturing()
        if not captured:
            self._release_completed()
        peers = {request.peer for request in requests}
        communicators = self._communicators_for(requests)
        pending = PendingOperation(
            first.operation,
            device,
            None if None in peers else frozenset(peer for peer in peers if peer is not None),
            captured,
            [request.operation.begin() for request in requests],
        )
        turn = device.issuing.turn(*[chosen.communicator for chosen in communicators])
        with self._watched(pending), turn, device.activate():
            self._failures.refuse(first.operation)
            self._issue(requests, communicators, pending)
        with self._releasing:
            self._unreleased.setdefault(pending.streams, deque()).append(pending)
        outputs = [tensor for request in requests for tensor in request.outputs]
        blocks = self._blocking or any(request.blocks for request in requests)
        return NcclWork(self._owner, pending, outputs, blocks, first.source)

    @contextmanager
    def _watched(self, pending: PendingOperation) -> Iterator[None]:
        """Lets the watchdog watch calls of NCCL, which may block; an error of theirs breaks the group."""
        self._watchdog.watch(pending)
        try:
            yield
        except NcclError as error:
            failure = pending.error = self._failures.call_failed(pending, error)
            raise failure from error
        except BaseException as error:
            if pending.error is None:
                pending.error = RuntimeError(f"{pending.operation}: not issued, because {error}")
            raise

    @contextmanager
    def _connecting(self, request: Request, peer: int) -> Iterator[None]:
        """Watches the calls that connect this rank with another one for a message."""
        pending = PendingOperation(request.operation, request.device, frozenset({peer}), False)
        with self._watched(pending):
            yield
            pending.issued(None, (), [])

    def _communicators_for(self, requests: list[Request]) -> list[StreamedCommunicator]:
        """Returns the communicator of each request; makes missing ones in an order that all ranks keep."""
        found: dict[tuple[int | None, bool], StreamedCommunicator] = {}

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
                found[key] = self._communicators.all_ranks(request.device, limit)
            else:
                connecting = self._connecting(request, request.peer)
                pair = self._communicators.pair(request.device, request.peer, limit, connecting)
                found[key] = pair.outgoing if request.sends else pair.incoming
        return [found[request.peer, request.sends] for request in requests]

    def _issue(
        self, requests: list[Request], communicators: list[StreamedCommunicator], pending: PendingOperation
    ) -> None:
        """Puts the requests on their streams; at this thread's turn."""
        device = pending.device
        current = device.current_stream()
        on_current = not any(request.async_op for request in requests)
        placed: list[tuple[Stream, CallSequence]] = []
        for chosen in communicators:
            stream = current if on_current else chosen.stream
            placed.append((stream, CallSequence(device, stream, chosen.communicator)))
        streams = list(dict.fromkeys(stream for stream, _ in placed))
        if not on_current:
            start = device.record(current)
            for stream in streams:
                device.wait(stream, start)
        for request, (_, sequence) in zip(requests, placed, strict=True):
            request.add_calls(sequence)
        for stream, sequence in placed:
            _run(device, stream, sequence.before)
        self._call([sequence for _, sequence in placed])
        for stream, sequence in placed:
            _run(device, stream, sequence.after)
        pending.issued(current, streams, [tensor for _, sequence in placed for tensor in sequence.kept])

    def _call(self, placed: list[CallSequence]) -> None:
        calls = [call for sequence in placed for call in sequence.calls]
        with self._library.group() if len(calls) > 1 else nullcontext():
            for call in calls:
                call()
        for sequence in placed:
            sequence.clean()

    def _release_completed(self) -> None:
        """Releases the tensors of completed operations that no stream waited for.

        Operations of the same streams complete in order, so that each look ends at the first that has not.
        """
        completed: list[PendingOperation] = []
        with self._releasing:
            for streams, queue in list(self._unreleased.items()):
                try:
                    while queue and (queue[0].released or queue[0].completed()):
                        completed.append(queue.popleft())
                except RuntimeError:  # the device's error: the watchdog sees to it
                    pass
                if not queue:
                    del self._unreleased[streams]
        for pending in completed:
            pending.release(pending.streams[0])


def _run(device: Device, stream: Stream, functions: list[Callable[[], object]]) -> None:
    if functions:
        device.run(stream, lambda: [function() for function in functions])
