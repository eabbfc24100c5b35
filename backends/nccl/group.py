"""The process group over NCCL."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch

from collectives import ProcessGroup
from collectives.backends._shared.exit_reasons import Departure
from collectives.backends._shared.health import MonitoredGroup
from collectives.backends._shared.operation import Operation
from collectives.backends.nccl.communicators import (
    Communicators,
    StreamedCommunicator,
    connects_in_capture,
)
from collectives.backends.nccl.device import CudaDevice, Stream, UsedDevices
from collectives.backends.nccl.libnccl import Communicator, NcclError, NcclLibrary
from collectives.backends.nccl.operations import FLOAT8_VERSION, CallSequence, Loopback, capabilities_on
from collectives.backends.nccl.options import NcclConfig, Options, checked_options
from collectives.backends.nccl.watchdog import Watchdog
from collectives.backends.nccl.work import Failures, KeptBack, NcclWork, PendingOperation, has_ended, pause
from collectives.core.arguments.staging import clusters, dense_outputs
from collectives.core.arguments.validation import fail
from collectives.core.backend_interface import HostCopy
from collectives.core.capabilities import Capabilities
from collectives.core.operations import ALL_REDUCE_COALESCED, BARRIER, OPERATIONS, Call
from collectives.core.recording.flight_record import RecordedOperation
from collectives.core.work import CoalescedWork, CompletedWork, Work
from collectives.logs import Log
from collectives.registry.backends import GroupOptions

_Direction = tuple[int | None, int | None]
"""The other rank of messages, ``None`` for collectives, and the sender where that is it."""


@dataclass(slots=True)
class _Request:
    """An operation that a member has called.

    Attributes:
        operation: what messages say about it.
        device: the device of its tensors.
        add: the method of a :class:`CallSequence` that adds its copies and calls of NCCL.
        given: what that takes: the call of a collective, or the tensor that is sent or received.
        outputs: its outputs.
        async_op: whether it runs apart from the current stream.
        peer: the other rank of a message; ``None`` for a collective.
        source: the sender of a receive.
        blocks: whether its Work's ``wait`` blocks the host.
    """

    operation: Operation
    device: CudaDevice
    add: Callable[[CallSequence, Any], None]
    given: Call | torch.Tensor
    outputs: Sequence[torch.Tensor]
    async_op: bool = True
    peer: int | None = None
    source: int | None = None
    blocks: bool = False


_ADDS = {one: getattr(CallSequence, one.handler) for one in OPERATIONS if hasattr(CallSequence, one.handler)}
"""What adds each collective to a sequence."""

_Placed = dict[StreamedCommunicator, list[_Request]]
"""The requests by where they go."""


class ProcessGroupNCCL(MonitoredGroup):
    """A group over NCCL: CUDA tensors, one device per rank.

    **Streams.** An asynchronous collective runs on a stream of the group's own, behind what the current
    stream holds when it is called; ``Work.wait()`` lets the current stream wait for it and the host go on. A
    synchronous one (``asyncOp=False``) runs on the current stream itself. A barrier's ``wait`` blocks the
    host. Tensors are kept until the streams have passed the operation, so they may be dropped at any time.

    **Messages** between two ranks wait for earlier ones between them, as NCCL carries out the operations of a
    communicator one after the other: those of both directions, or around a ring, belong in
    ``batch_isend_irecv``. With ``Options(duplex_messages=True)`` they wait only for earlier ones of the same
    direction. The first between two ranks blocks both hosts until both have called one, in either direction.
    There are no tags and no receives from any rank; a message to the own rank must be sent before it is
    received, or in the same batch.

    **Together.** Operations of a batch, or of a coalescing manager, are one launch with one Work: it fails as
    a whole as soon as one of them passes its time limit.

    **Connections** are made by the first collective, and at once where the group was given a ``device_id``.
    Then groups made of some of its ranks are split off its communicator.

    **CUDA graphs.** Operations may be captured, after one that made the connections. Graphs must be let go of
    before the group: NCCL cannot end a communicator while one holds its operations. The end of the group then
    goes on after ten seconds, with a warning. A replay has the time limits of its operations, each from its
    own beginning, and ends where a rank that it needs is gone: what it writes from then on may be anything,
    the error is logged, and every later call raises it.

    **Errors.** NCCL compares nothing between ranks: different operations at one place of the order give wrong
    values or wait for each other. A watchdog ends an operation that passes its time limit, or that needs a
    rank which is gone or has given up, by aborting the group's communicators; its outputs then hold anything.
    The Work raises the error if it has not been waited for yet, and so does every later call.

    **Numerics.** NCCL cannot promise the rules of this package. All ranks get the same bits, but the order of
    a sum depends on the algorithm, the number of channels and the size; 16-bit floats are rounded at every
    step; AVG and PREMUL_SUM multiply each input before it is added. The factor is rounded to the tensor's
    type: where the number of ranks is no power of two, AVG of bfloat16 is off by up to 0.2 %, of float16 by
    0.03 %. Averages of such tensors that must be better are sums of float32, divided.

    Args:
        options: store, rank, size and what else the registry gives.
        library: NCCL.
        devices: kind of the devices; tests rehearse without CUDA.
    """

    backend_type: ClassVar[ProcessGroup.BackendType] = ProcessGroup.BackendType.NCCL
    _is_recorded = True
    _health: Failures
    Options = Options
    NCCLConfig = NcclConfig

    def __init__(
        self, options: GroupOptions, library: NcclLibrary, devices: type[CudaDevice] = CudaDevice
    ) -> None:
        self.options = checked_options(options.pg_options, options.rank)
        super().__init__(**options.membership())
        self._library = library
        self._make_device = devices
        self._devices = UsedDevices(devices, self.where())
        self._operation = partial(Operation, self._flight_record)
        self._capabilities: Capabilities | None = None
        self._global_ranks = options.global_ranks or tuple(range(options.size))
        self._bound = options.device_id
        self._checks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._connect(options.store, options.split_from)

    def _connect(self, store: Any, parent: ProcessGroup | None = None) -> None:
        # Nothing of this may keep the group alive: communicators and watchdog outlive it.
        @contextmanager
        def ending() -> Iterator[None]:
            """Fails all pending operations and stops NCCL, which has ended after the ``with`` block.

            Of these connections, whatever the group has by then.
            """
            for pending in watchdog.pending():
                if not has_ended(pending):
                    pending.fail(failures.stopped_error(pending.operation))
            loopback.clear()
            communicators.begin_abort()
            try:
                yield
            finally:
                communicators.abort()

        failures = self._health = Failures(
            store, self._rank, self._size, self.where(), ending, Log().of(self)
        )
        communicators = self._communicators = Communicators(self._library, store, self.options, failures)
        watchdog = Watchdog(failures, communicators, f"nccl watchdog {self._group_name}")
        self._watchdog = watchdog
        loopback = self._loopback = Loopback()
        self._numbers = itertools.count(1)
        self._message_numbers = itertools.count(1)
        self._unreleased: dict[tuple[Stream, ...], deque[PendingOperation]] = {}
        self._releasing = threading.Lock()
        self._region = _Region()
        self._blocking = self.options.waits_block
        # Never left to the providers' destructors: NCCL's orderly end waits for other ranks.
        self._finalizer = weakref.finalize(self, _let_go, communicators, watchdog)
        bound, self._bound = self._bound, None
        if bound is not None:
            self._bind_device(bound, parent)

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        self._finalizer.detach()

    # ---- identity ------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What this group can do."""
        if self._capabilities is None:
            float8 = self._library.version() >= FLOAT8_VERSION and self._make_device.reduces_float8()
            self._capabilities = capabilities_on(self._make_device.kind, float8)
        return self._capabilities

    @property
    def needs_batches(self) -> bool:
        """``True``: a message waits for earlier ones of its ranks, and the first one for the other rank."""
        return True

    def name(self) -> str:
        """Returns ``"nccl"``."""
        return "nccl"

    # ---- collectives ---------------------------------------------------------------------------------------

    def issue(self, call: Call) -> Work:
        """Enqueues a collective, or keeps it back in the coalescing region that is open on this thread."""
        kind = call.operation
        if kind is ALL_REDUCE_COALESCED:
            if len({tensor.device for tensor in call.outputs}) != 1:  # none, or more than a region takes
                return super().issue(call)
            if clusters(call.outputs):
                separate = dense_outputs(call.outputs, separate=True)
                return separate.finish(self.issue(call.as_(kind, separate.stand_ins)), call.async_op)
            call.outputs = list(call.outputs)  # which a region keeps to its end
        if kind not in _ADDS:
            return super().issue(call)
        if kind is BARRIER:
            device = self._devices.for_barrier(call.device, self._global_ranks[self._rank])
        else:
            device = self._devices[call.tensor.device]
        limit = call.timeout or self._timeout
        operation = self._operation(kind.offered_as, 0, call.shown, limit, call.detail)
        blocks = kind is BARRIER
        return self._submit(
            _Request(operation, device, _ADDS[kind], call, call.outputs, call.async_op, blocks=blocks)
        )

    def is_stream_ordered(self, device: torch.device) -> bool:
        """Returns whether ``Work.wait()`` lets the current stream wait: unless ``blocking_wait`` is set."""
        return device.type == self._make_device.kind and not self.options.waits_block

    def is_capturing(self, device: torch.device) -> bool:
        """Returns whether the current stream of a device is being captured into a CUDA graph."""
        return device.type == self._make_device.kind and self._devices[device].capturing()

    def to_host_later(self, tensor: torch.Tensor) -> HostCopy:
        """Begins to copy an output to the host; see :meth:`collectives.ProcessGroup.to_host_later`."""
        device = self._devices[tensor.device]
        if device.capturing():  # the copy would become part of the graph
            return super().to_host_later(tensor)
        failures, (values, event) = self._health, device.to_host(tensor)

        def done() -> bool:
            return failures.over or device.passed(event)

        def result() -> torch.Tensor:
            if not done():
                device.block(event)
            failures.refuse("its outputs may hold anything, as")
            return values

        return HostCopy(result, done)

    def check_before_shutdown(self, check: Callable[[], None]) -> None:
        """Has a function called by :meth:`shutdown`; see :meth:`collectives.ProcessGroup`."""
        self._checks.append(weakref.WeakMethod(check))

    # ---- several at once -----------------------------------------------------------------------------------

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Enqueues the operations that this thread issues inside as one, at the end."""
        with self._coalescing():
            yield

    def _issue_together(self, issue: Callable[[], list[Work]]) -> Work:
        """Returns one Work for what ``issue`` issues, so that one wait serves it; see the base class."""
        with self._coalescing() as whole:
            works = issue()
        return whole[0] if whole else CoalescedWork(works)

    # ---- point-to-point ------------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:  # noqa: ARG002 - there are none
        operation = self._operation("send", 0, [tensor], self._timeout, f"to rank {dst}")
        device = self._devices[tensor.device]
        return self._submit(_Request(operation, device, CallSequence.send, tensor, (), peer=dst))

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:  # noqa: ARG002 - there are none
        operation = self._operation("recv", 0, [tensor], self._timeout, f"from rank {src}")
        device = self._devices[tensor.device]
        return self._submit(
            _Request(operation, device, CallSequence.receive, tensor, [tensor], peer=src, source=src)
        )

    # ---- enqueueing ----------------------------------------------------------------------------------------

    def _submit(self, request: _Request) -> Work:
        """Enqueues a request, or keeps it back in the coalescing region that is open on this thread."""
        if self._health.over:
            self._health.refuse(request.operation)
        kept = self._region.kept
        if kept is None:
            return self._enqueue([request])
        held = KeptBack(request.operation.name, request.device)
        work = NcclWork(self, self._health, held, request.outputs, source=request.source)
        kept.append((request, work))
        return work

    @contextmanager
    def _coalescing(self) -> Iterator[list[Work]]:
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
        for _, work in kept:
            work.bind(whole)
        result.append(whole)

    def _enqueue(self, requests: list[_Request]) -> NcclWork:
        first = requests[0]
        device = first.device
        if not device.is_current():
            with device.activate():
                return self._enqueue(requests)
        outputs: list[torch.Tensor] = []
        blocks, on_current = self._blocking, True
        directions: dict[_Direction, list[_Request]] = {}
        for request in requests:
            if request.device is not device:
                named = ", ".join(sorted({str(request.device.device) for request in requests}))
                why = f"operations that start together are on several devices: {named}"
                fail(self, request.operation.name, why)
            outputs += request.outputs
            blocks = blocks or request.blocks
            on_current = on_current and not request.async_op
            directions.setdefault((request.peer, request.source), []).append(request)
        captured = device.is_capturing(device.current_stream())
        if not captured:
            self._release_completed()
        own: tuple[list[_Request], list[_Request]] | None = None
        if first.peer is not None or len(requests) > 1:
            own = directions.pop((self._rank, None), []), directions.pop((self._rank, self._rank), [])
        peers = None
        if (None, None) not in directions:
            peers = frozenset(peer for peer, _ in directions if peer is not None)
        placed = self._placed(directions, captured)
        turn = device.issuing.begin(list(placed))
        try:
            if self._health.over:
                self._health.refuse(first.operation)
            pending = self._issue(requests, placed, own, peers, on_current, captured)
        finally:
            device.issuing.end(turn)
        with self._releasing:
            self._unreleased.setdefault(pending.streams, deque()).append(pending)
        source = first.source if len(requests) == 1 else None
        return NcclWork(self, self._health, pending, outputs, blocks, source)

    def _note_failure(self, pending: PendingOperation, error: BaseException) -> None:
        """Fails an operation that was not issued.

        Raises:
            Exception: for an error of NCCL, which breaks the group.
        """
        if isinstance(error, NcclError):
            failure = self._health.call_failed(pending, error)
            pending.fail(failure)
            raise failure from error
        if pending.error is None:
            pending.fail(RuntimeError(f"{pending.operation}: not issued, because {error}"))

    @contextmanager
    def _connecting(self, request: _Request, peer: int) -> Iterator[None]:
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

    def _placed(self, directions: dict[_Direction, list[_Request]], captured: bool) -> _Placed:
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
                    f"{self._health.where} {requests[0].operation}: the connections that it has to make"
                )
            placed[chosen] = placed[chosen] + requests if chosen in placed else requests
        return placed

    def _order(self, item: tuple[_Direction, list[_Request]]) -> tuple[int, int]:
        peer, own = item[0][0], self._rank
        return (-1, -1) if peer is None else (min(own, peer), max(own, peer))

    def _issue(
        self,
        requests: list[_Request],
        placed: _Placed,
        own: tuple[list[_Request], list[_Request]] | None,
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
        kept: list[torch.Tensor] = []
        try:
            self._prepare(device, placed, current, on_current, sequences)
        except NcclError as error:
            refused = error
        streams: dict[Stream, None] = {}  # in order, each once
        for sequence in sequences:
            streams[sequence.stream] = None
        if own is not None and any(own):
            sent, received = (
                [one.given for one in some if isinstance(one.given, torch.Tensor)] for some in own
            )
            self._loopback.issue(self, device, current, sent, received)
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
                request.add(sequence, request.given)

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
            with self._library.group:
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

    # ---- devices -------------------------------------------------------------------------------------------

    def _bind_device(self, bound: torch.device, parent: ProcessGroup | None = None) -> None:
        """Makes the communicator of all ranks eagerly; splits the parent's if that was made eagerly."""
        if bound.type != self._make_device.kind or self._bound is not None:
            return
        self._bound = bound
        self._devices.bound = device = self._devices[bound]
        try:
            if isinstance(parent, ProcessGroupNCCL) and parent._bound == bound:
                color = min(parent._global_ranks.index(rank) for rank in self._global_ranks)
                part = parent._split(color, self._rank, self._timeout, self.options.config)
                if part is not None:
                    self._communicators.adopt(device, part)
            else:
                self._communicators.all_ranks(device, self._timeout)
        except BaseException:
            self.abort()
            raise

    def _split(
        self, color: int, key: int, limit: timedelta, config: NcclConfig | None
    ) -> Communicator | None:
        """Splits the communicator of all ranks, with nothing under way; called by all ranks."""
        if self._bound is None:
            return None
        self._health.refuse("splitting the communicator")
        self._drain()
        return self._communicators.split(self._devices[self._bound], color, key, limit, config)

    def _decline_split(self) -> None:
        self._split(-1, 0, self._timeout, None)

    # ---- failures ------------------------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        self._health.refuse("its outputs may hold anything, as")

    def note_refusal(self) -> None:
        """Lets this rank take part in the next attempt of others that gave up on it."""
        self._communicators.rendezvous.note_refusal()

    # ---- life ----------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Breaks the group at once; see :meth:`collectives.ProcessGroup.abort`."""
        if self._health.abort():
            self._communicators.abort()
            self._watchdog.stop()
            self._finalizer.detach()

    def _begin_abort(self) -> None:
        """Stops NCCL's kernels: the abort of another group waits until no kernel runs on the device."""
        self._communicators.begin_abort()

    def _drain(self) -> None:
        """Blocks until all operations have ended; where none does, the watchdog sees to it."""
        attempt = 0
        while self._health.cause is None and not all(map(has_ended, self._watchdog.pending())):
            pause(attempt)
            attempt += 1

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees the communicators.

        NCCL may wait there for ranks that have not called this; after ten seconds the group goes on without.

        Raises:
            DistError: an operation failed after it was waited for, as the last pass of a model may have; the
                group has ended all the same.
        """
        with ExitStack() as stack:
            stack.callback(self._shut_down)
            while self._checks:  # each is called, and the first error leaves
                check = self._checks.pop()()
                if check is not None:
                    stack.callback(check)

    def _shut_down(self) -> None:
        self._drain()
        if not self._health.end():
            return
        self._watchdog.stop()
        if self._health.cause is None:
            self._health.publish(Departure(self._rank, None))
            self._communicators.destroy()
        self._finalizer.detach()


def _let_go(communicators: Communicators, watchdog: Watchdog) -> None:
    """Ends what a group leaves that was neither shut down nor aborted."""
    watchdog.stop()
    communicators.abort()


class _Region(threading.local):
    """The coalescing region that is open on a thread."""

    kept: list[tuple[_Request, NcclWork]] | None = None


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
