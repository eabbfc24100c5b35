"""Puts operations on CUDA streams: each as it is called, or those of a coalescing region as one."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from collectives.backends._shared.operation import Operation
from collectives.backends.nccl.communicators import (
    Communicators,
    StreamedCommunicator,
    connects_in_capture,
)
from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.failures import Failures
from collectives.backends.nccl.libnccl.codes import NcclError
from collectives.backends.nccl.libnccl.interface import NcclLibrary
from collectives.backends.nccl.loopback import Loopback
from collectives.backends.nccl.operations.in_flight import PendingOperation
from collectives.backends.nccl.operations.nccl_calls import CallSequence
from collectives.backends.nccl.watchdog import Watchdog
from collectives.backends.nccl.work import CoalescedOperationWork, NcclWork, Owner
from collectives.core.arguments.validation import fail
from collectives.core.recording.flight_record import RecordedOperation
from collectives.core.work import CompletedWork, Work

__all__ = ["Enqueuer", "Request"]

_Direction = tuple[int | None, int | None]
"""The other rank of messages, ``None`` for collectives, and the sender where that is it."""


@dataclass(slots=True)
class Request:
    """An operation that a member has called.

    Attributes:
        operation: what messages say about it.
        device: the device of its tensors.
        add_calls: adds its copies and calls of NCCL to a sequence.
        outputs: its outputs.
        async_op: whether it runs apart from the current stream.
        peer: the other rank of a message; ``None`` for a collective.
        source: the sender of a receive.
        blocks: whether its Work's ``wait`` blocks the host.
        message: the tensor that is sent or received.
    """

    operation: Operation
    device: CudaDevice
    add_calls: Callable[[CallSequence], None]
    outputs: Sequence[torch.Tensor]
    async_op: bool = True
    peer: int | None = None
    source: int | None = None
    blocks: bool = False
    message: torch.Tensor | None = None


_Placed = dict[StreamedCommunicator, list[Request]]
"""The requests by where they go."""


class Enqueuer:
    """Enqueues the requests of one group.

    Args:
        library: NCCL.
        communicators: the group's communicators.
        loopback: the messages of this rank to itself.
        failures: what ends the group.
        watchdog: watches pending operations.
        owner: the group, for its Works.
        blocking: whether every Work's ``wait`` blocks the host.
    """

    def __init__(
        self,
        library: NcclLibrary,
        communicators: Communicators,
        loopback: Loopback,
        failures: Failures,
        watchdog: Watchdog,
        owner: Owner,
        blocking: bool,
    ) -> None:
        self._library = library
        self._communicators = communicators
        self._loopback = loopback
        self._failures = failures
        self._watchdog = watchdog
        self._owner = owner
        self._rank = owner.rank()
        self._blocking = blocking
        self._numbers = itertools.count(1)
        self._message_numbers = itertools.count(1)
        self._unreleased: dict[tuple[Stream, ...], deque[PendingOperation]] = {}
        self._releasing = threading.Lock()
        self._region = _Region()

    def submit(self, request: Request) -> Work:
        """Enqueues a request, or keeps it back in the coalescing region that is open on this thread."""
        if self._failures.over:
            self._failures.refuse(request.operation)
        kept = self._region.kept
        if kept is None:
            return self._enqueue([request])
        work = CoalescedOperationWork(request.operation.name, request.device)
        kept.append((request, work))
        return work

    @contextmanager
    def coalescing(self) -> Iterator[list[Work]]:
        """Keeps requests of this thread back, enqueues them as one at the end, and drops them after an error.

        Yields:
            A list that holds the Work of the whole after the end; for an inner region, which belongs to the
            outer one, it stays empty.

        Raises:
            ValueError: the requests are on different devices.
        """
        if self._region.kept is not None:
            yield []
            return
        kept = self._region.kept = []
        result: list[Work] = []
        try:
            yield result
        finally:
            self._region.kept = None
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
        if not device.is_current():
            with device.activate():
                return self._enqueue(requests)
        outputs: list[torch.Tensor] = []
        blocks, on_current = self._blocking, True
        directions: dict[_Direction, list[Request]] = {}
        for request in requests:
            if request.device is not device:
                named = ", ".join(sorted({str(request.device.device) for request in requests}))
                fail(
                    self._owner,
                    request.operation.name,
                    f"operations that start together are on several devices: {named}",
                )
            outputs += request.outputs
            blocks = blocks or request.blocks
            on_current = on_current and not request.async_op
            directions.setdefault((request.peer, request.source), []).append(request)
        captured = device.is_capturing(device.current_stream())
        if not captured:
            self._release_completed()
        own: tuple[list[Request], list[Request]] | None = None
        if first.peer is not None or len(requests) > 1:
            own = directions.pop((self._rank, None), []), directions.pop((self._rank, self._rank), [])
        peers = None
        if (None, None) not in directions:
            peers = frozenset(peer for peer, _ in directions if peer is not None)
        placed = self._placed(directions, captured)
        turn = device.issuing.begin(list(placed))
        try:
            if self._failures.over:
                self._failures.refuse(first.operation)
            pending = self._issue(requests, placed, own, peers, on_current, captured)
        finally:
            device.issuing.end(turn)
        with self._releasing:
            self._unreleased.setdefault(pending.streams, deque()).append(pending)
        source = first.source if len(requests) == 1 else None
        return NcclWork(self._owner, pending, outputs, blocks, source)

    def _note_failure(self, pending: PendingOperation, error: BaseException) -> None:
        """Fails an operation that was not issued.

        Raises:
            Exception: for an error of NCCL, which breaks the group.
        """
        if isinstance(error, NcclError):
            failure = self._failures.call_failed(pending, error)
            pending.fail(failure)
            raise failure from error
        if pending.error is None:
            pending.fail(RuntimeError(f"{pending.operation}: not issued, because {error}"))

    @contextmanager
    def _connecting(self, request: Request, peer: int) -> Iterator[None]:
        """Watches the calls that connect this rank with another one for a message; they may block."""
        request.operation.number = next(self._message_numbers)
        pending = PendingOperation([request.operation], request.device, frozenset({peer}), False)
        self._watchdog.watch(pending)
        try:
            yield
            pending.issued(None, (), [])
        except BaseException as error:
            self._note_failure(pending, error)
            raise

    def _placed(self, directions: dict[_Direction, list[Request]], captured: bool) -> _Placed:
        """Returns the communicator of each direction; makes missing ones in an order that all ranks keep.

        Raises:
            DistBackendError: one has no connections, and a capture is under way.
        """
        placed: _Placed = {}
        ordered = sorted(directions.items(), key=self._order) if len(directions) > 1 else directions.items()
        for (peer, source), requests in ordered:
            device, limit = requests[0].device, requests[0].operation.timeout
            if len(requests) > 1:
                limit = min(request.operation.timeout for request in requests)
            if peer is None:
                made = self._communicators.made.get(device)
                chosen = made or self._communicators.all_ranks(device, limit)
            else:
                pair = self._communicators.pair(
                    device, peer, limit, partial(self._connecting, requests[0], peer)
                )
                chosen = pair.outgoing if source is None else pair.incoming
            if not captured:
                self._communicators.connected.add(chosen)
            elif chosen not in self._communicators.connected:
                raise connects_in_capture(
                    f"{self._owner.where()} {requests[0].operation}: the connections that it has to make"
                )
            placed[chosen] = placed[chosen] + requests if chosen in placed else requests
        return placed

    def _order(self, item: tuple[_Direction, list[Request]]) -> tuple[int, int]:
        peer, own = item[0][0], self._rank
        return (-1, -1) if peer is None else (min(own, peer), max(own, peer))

    def _issue(
        self,
        requests: list[Request],
        placed: _Placed,
        own: tuple[list[Request], list[Request]] | None,
        peers: frozenset[int] | None,
        on_current: bool,
        captured: bool,
    ) -> PendingOperation:
        """Puts requests on their streams, or on the current one; at this thread's turn.

        Operations get their numbers here. Those that a rank refuses, or that not all ranks have come to,
        count nowhere, so that the numbers of the ranks stay in step.

        Args:
            requests: all of them.
            placed: those of NCCL.
            own: messages of this rank to itself, those sent and those received.
            peers: the ranks that they need; ``None`` for all.
            on_current: whether all go to the current stream.
            captured: whether that is being captured.
        """
        device = requests[0].device
        current = device.current_stream()
        refused: NcclError | None = None
        sequences: list[CallSequence] = []
        try:
            self._prepare(device, placed, current, on_current, sequences)
        except NcclError as error:
            refused = error
        kept: list[torch.Tensor] = []
        streams: dict[Stream, None] = {}  # in order, each once
        for sequence in sequences:
            streams[sequence.stream] = None
        if own is not None and any(own):
            sent, received = ([one.message for one in some if one.message is not None] for some in own)
            self._loopback.issue(device, current, sent, received)
            kept += sent + received
            streams[current] = None
        operations: list[Operation] = []
        recorded: list[RecordedOperation] = []
        for request in requests:
            operation = request.operation
            if not operation.number:
                operation.number = next(self._numbers if request.peer is None else self._message_numbers)
            operations.append(operation)
            recorded.append(operation.begin())
        pending = PendingOperation(operations, device, peers, captured, recorded)
        self._watchdog.watch(pending)
        try:
            if refused is not None:
                raise refused
            if captured:
                self._capture(placed, device, sequences, kept, operations, peers)
            else:
                self._launch(device, sequences, kept)
            pending.issued(current, list(streams), kept)
        except NcclError as error:
            self._note_failure(pending, error)
            raise
        except BaseException:
            # A signal's handler may have raised: what was begun by then uses the tensors until it has ended.
            pending.issued(current, list(streams), kept)
            raise
        return pending

    def _prepare(
        self,
        device: CudaDevice,
        placed: _Placed,
        current: Stream,
        on_current: bool,
        sequences: list[CallSequence],
    ) -> None:
        """Adds the calls of requests, on streams that wait for the current one, or on that."""
        for chosen, some in placed.items():
            stream = current if on_current else chosen.stream
            if not on_current:
                device.order(stream, current)
            sequence = CallSequence(device, stream, chosen.communicator)
            sequences.append(sequence)
            for request in some:
                request.add_calls(sequence)

    def _capture(
        self,
        placed: _Placed,
        device: CudaDevice,
        sequences: Sequence[CallSequence],
        kept: list[torch.Tensor],
        operations: Sequence[Operation],
        peers: frozenset[int] | None,
    ) -> None:
        """Does :meth:`_launch` into a graph, whose replays are watched."""
        for chosen, sequence in zip(placed, sequences, strict=True):
            self._watchdog.watch_replays(chosen.replays)
            chosen.replays.begin(sequence.stream, operations, peers)
        self._launch(device, sequences, kept)
        for chosen, sequence in zip(placed, sequences, strict=True):
            chosen.replays.end(sequence.stream)

    def _launch(
        self, device: CudaDevice, sequences: Sequence[CallSequence], kept: list[torch.Tensor]
    ) -> None:
        """Puts copies and calls on their streams; adds the tensors that they use to ``kept``."""
        calls: list[Callable[[], object]] = []
        for sequence in sequences:
            calls += sequence.calls
            kept += sequence.kept
        for sequence in sequences:
            if sequence.before:
                _copy(device, sequence.stream, sequence.before)
        if len(calls) == 1:
            calls[0]()
        elif calls:
            with self._library.group():
                for call in calls:
                    call()
        for sequence in sequences:
            for op in sequence.made_ops:
                sequence.communicator.destroy_op(op)
            if sequence.after:
                _copy(device, sequence.stream, sequence.after)

    def _release_completed(self) -> None:
        """Releases the tensors of completed operations that no stream waited for.

        Operations of the same streams complete in order, so that each look ends at the first that has not.
        """
        completed: list[PendingOperation] = []
        with self._releasing:
            for streams, queue in list(self._unreleased.items()):
                try:
                    while queue and (queue[0].released or queue[0].completed()):
                        pending = queue.popleft()
                        if not pending.released:
                            completed.append(pending)
                except RuntimeError:  # the device's error: the watchdog sees to it
                    pass
                if not queue:
                    del self._unreleased[streams]
        for pending in completed:
            pending.release()


class _Region(threading.local):
    """The coalescing region that is open on a thread."""

    kept: list[tuple[Request, CoalescedOperationWork]] | None = None


def _copy(device: CudaDevice, stream: Stream, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Puts copies on a stream, in one launch where the device can."""
    targets, sources = [to for to, _ in copies], [from_ for _, from_ in copies]

    def run() -> None:
        if any(to.is_conj() or to.is_neg() for to in targets):  # which the one launch does not take
            for to, from_ in copies:
                to.copy_(from_)
        else:
            torch._foreach_copy_(targets, sources)

    device.run(stream, run)
