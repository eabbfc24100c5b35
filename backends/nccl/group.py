"""The process group over NCCL."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch

from collectives import ProcessGroup
from collectives.backends._shared.operation import Operation
from collectives.backends.nccl.communicators import Communicators
from collectives.backends.nccl.device import CudaDevice, Event
from collectives.backends.nccl.device.used import UsedDevices
from collectives.backends.nccl.ends import Ends
from collectives.backends.nccl.failures import Failures
from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.backends.nccl.libnccl.interface import Communicator, NcclLibrary
from collectives.backends.nccl.loopback import Loopback
from collectives.backends.nccl.operations import nccl_calls
from collectives.backends.nccl.operations.enqueue import Enqueuer, Request
from collectives.backends.nccl.operations.in_flight import PendingOperation, has_completed, has_ended, pause
from collectives.backends.nccl.operations.reductions import FLOAT8_VERSION, capabilities_on
from collectives.backends.nccl.options import Options, checked_options
from collectives.backends.nccl.rendezvous import Rendezvous
from collectives.backends.nccl.watchdog import Watchdog
from collectives.core.arguments.staging import clusters, dense_outputs
from collectives.core.capabilities import Capabilities
from collectives.core.host_copies import HostCopy
from collectives.core.operations import ALL_REDUCE_COALESCED, BARRIER, Call
from collectives.core.work import CoalescedWork, Work
from collectives.errors import DistError
from collectives.logs import Log
from collectives.registry.backends import GroupOptions

__all__ = ["ProcessGroupNCCL"]


class ProcessGroupNCCL(ProcessGroup):
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
    The error is raised by the Work, where that has not been waited for yet, and every later call.

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
        log = Log().of(self)
        watchdog = self._watchdog = Watchdog(self, f"nccl watchdog {self._group_name}", log)
        where, rank, size = self.where(), self._rank, self._size

        @contextmanager
        def ending(cause: DistError) -> Iterator[None]:
            """Fails all pending operations and stops NCCL, which has ended after the ``with`` block.

            Of these connections, whatever the group has by then.
            """
            for pending in watchdog.pending():
                if pending.error is None and not has_completed(pending):
                    pending.fail(failures.stopped_error(pending.operation, cause))
            loopback.clear()
            communicators.ends.begin_abort()
            yield
            communicators.ends.abort()

        failures = self._failures = Failures(store, rank, size, where, ending, log)
        # Communicators and watchdog outlive the group where it is dropped, and must not keep it alive.
        this = weakref.proxy(self)
        # A proxy's method would be a strong reference, hence the lambdas.
        self._rendezvous = Rendezvous(store, rank, where, lambda missing: this._check_missing(missing))  # noqa: PLW0108
        communicators = self._communicators = Communicators(
            self._library,
            self._rendezvous,
            rank,
            size,
            self.options,
            where,
            log,
            lambda: this._refuse_to_connect(),  # noqa: PLW0108
        )
        loopback = self._loopback = Loopback(this)
        self._enqueuer = Enqueuer(
            self._library, communicators, loopback, failures, watchdog, self, self.options.waits_block
        )
        # Never left to the providers' destructors: NCCL's orderly end waits for other ranks.
        self._finalizer = weakref.finalize(self, _let_go, communicators.ends, watchdog)
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
        if kind is BARRIER:
            device = self._devices.for_barrier(call.device, self._global_ranks[self._rank])
        else:
            device = self._devices[call.tensor.device]
        operation = self._operation(
            kind.offered_as, 0, call.shown, call.timeout or self._timeout, call.detail
        )
        return self._enqueuer.submit(
            Request(
                operation,
                device,
                partial(nccl_calls.COLLECTIVES[kind], call=call),
                call.outputs,
                async_op=call.async_op,
                blocks=kind is BARRIER,
            )
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
        return _PinnedCopy(self._failures, device, *device.to_host(tensor))

    def check_before_shutdown(self, check: Callable[[], None]) -> None:
        """Has a function called by :meth:`shutdown`; see :meth:`collectives.ProcessGroup`."""
        self._checks.append(weakref.WeakMethod(check))

    # ---- several at once -----------------------------------------------------------------------------------

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Enqueues the operations that this thread issues inside as one, at the end."""
        with self._enqueuer.coalescing():
            yield

    def _issue_together(self, issue: Callable[[], list[Work]]) -> Work:
        """Returns one Work for what ``issue`` issues, so that one wait serves it; see the base class."""
        with self._enqueuer.coalescing() as whole:
            works = issue()
        return whole[0] if whole else CoalescedWork(works)

    # ---- point-to-point ------------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:  # noqa: ARG002 - there are none
        operation = self._operation("send", 0, [tensor], self._timeout, f"to rank {dst}")
        add_calls = partial(nccl_calls.send, tensor=tensor)
        request = Request(operation, self._devices[tensor.device], add_calls, (), peer=dst, message=tensor)
        return self._enqueuer.submit(request)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:  # noqa: ARG002 - there are none
        operation = self._operation("recv", 0, [tensor], self._timeout, f"from rank {src}")
        add_calls = partial(nccl_calls.receive, tensor=tensor)
        device = self._devices[tensor.device]
        request = Request(operation, device, add_calls, [tensor], peer=src, source=src, message=tensor)
        return self._enqueuer.submit(request)

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
        self._failures.refuse("splitting the communicator")
        self._drain()
        return self._communicators.split(self._devices[self._bound], color, key, limit, config)

    def _decline_split(self) -> None:
        self._split(-1, 0, self._timeout, None)

    # ---- watching ------------------------------------------------------------------------------------------

    def check_communicators(self) -> None:
        """Breaks the group if a communicator has met an error."""
        for communicator in self._communicators.ends.open():
            error = communicator.async_error()
            if error is not None:
                self._failures.communicator_failed(self._watchdog.oldest(), error)

    def expire(self, pending: PendingOperation) -> None:
        """Fails an operation that passed its time limit, and breaks the group.

        Args:
            pending: the operation; nothing happens where it has failed already.
        """
        self._failures.expire(pending)

    def check_peers(self, slow: PendingOperation | None) -> None:
        """Publishes what this rank waits in, and breaks the group if a rank is gone or has given up.

        Args:
            slow: the operation that it waits in; ``None`` for none that is slow.
        """
        self._failures.publish_waiting(slow)
        if slow is not None:
            needed = slow.peers if slow.peers is not None else range(self._size)
            self._failures.check_peers(slow, needed)

    def note_device_error(self, pending: PendingOperation, error: RuntimeError) -> None:
        """Breaks the group after the device has met an error.

        Args:
            pending: the operation that was in flight.
            error: what CUDA raised.
        """
        self._failures.call_failed(pending, error)

    def _check_missing(self, missing: Sequence[int]) -> None:
        """Raises if the group has ended, or has to because ranks will not come."""
        self._failures.check_peers(None, missing)
        if self._failures.cause is not None:
            raise self._failures.cause

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, as far as this one sees, or whose loss is known."""
        return self._failures.lost_ranks()

    def _first_cause(self) -> DistError | None:
        return self._failures.cause

    def _break_for(self, cause: DistError) -> None:
        self._failures.break_for(cause)

    def _raise_failure(self) -> None:
        self._failures.refuse("its outputs may hold anything, as")

    def note_refusal(self) -> None:
        """Lets this rank take part in the next attempt of others that gave up on it."""
        self._rendezvous.note_refusal()

    def _refuse_to_connect(self) -> None:
        self._failures.refuse("making a communicator")

    # ---- life ----------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Breaks the group at once; see :meth:`collectives.ProcessGroup.abort`."""
        if self._failures.leave(aborts=True):
            self._communicators.ends.abort()
            self._watchdog.stop()
            self._finalizer.detach()

    def _begin_abort(self) -> None:
        """Stops NCCL's kernels: the abort of another group waits until no kernel runs on the device."""
        self._communicators.ends.begin_abort()

    def _drain(self) -> None:
        """Blocks until all operations have ended; where none does, the watchdog sees to it."""
        attempt = 0
        while self._failures.cause is None and not all(map(has_ended, self._watchdog.pending())):
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
        if not self._failures.leave(aborts=False):
            return
        self._watchdog.stop()
        if self._failures.cause is None:
            self._failures.publish_shutdown()
            self._communicators.ends.destroy()
        self._finalizer.detach()


class _PinnedCopy(HostCopy):
    """A copy on its way to pinned memory.

    Args:
        failures: tells whether the group has ended.
        device: the device.
        values: the memory.
        event: is done when the values are there.
    """

    def __init__(self, failures: Failures, device: CudaDevice, values: torch.Tensor, event: Event) -> None:
        self._failures = failures
        self._device = device
        self._values = values
        self._event = event

    def done(self) -> bool:
        return self._failures.over or self._device.passed(self._event)

    def result(self) -> torch.Tensor:
        if not self.done():
            self._device.block(self._event)
        self._failures.refuse("its outputs may hold anything, as")
        return self._values


def _let_go(ends: Ends, watchdog: Watchdog) -> None:
    """Ends what a group leaves that was neither shut down nor aborted."""
    watchdog.stop()
    ends.abort()
