"""Operations on CUDA streams: when they have completed, what they keep until then, and their Works.

What the host sees of operations in a CUDA graph while that is replayed: a replay calls nothing of ours, and
events that were recorded in a capture tell nothing. So a captured operation writes to memory of the host
where it stands on its stream: its number when NCCL may begin it, and zeros behind it. The host sets a mark
beside the number that it sees, which the zeros take away: where number and mark are still there, the
operation has been under way since.

NCCL lets ranks wait for each other without limit, and reports an error of one rank to no other. So every rank
publishes in the group's store that it gave up and why, and which operation it waits in while that is slow.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from collectives.backends._shared.exit_reasons import Departure, blamed
from collectives.backends._shared.health import Health
from collectives.backends._shared.operation import Operation
from collectives.backends.nccl.device import CudaDevice, Event, Stream
from collectives.backends.nccl.libnccl import NcclError, NcclStatus
from collectives.core.recording.flight_record import RecordedOperation
from collectives.core.work import Work, settle
from collectives.errors import CollectiveTimeoutError, DistBackendError
from collectives.logs import Log
from collectives.time_limits import seconds_to_wait

LOOK_SECONDS = 1.0
"""How often a rank that waits asks the store about the others, while a communicator forms and later. With 64
ranks these are 64 questions a second, of the tens of thousands that a store answers; to find a death earlier
than that pays nothing beside the seconds that making connections takes."""

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
        """Notes why the operations failed; the first reason counts."""
        if self.error is None:
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
        """Notes why the operations failed; the first reason counts."""
        if self.error is None:
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


# ---- failures ------------------------------------------------------------------------------------------


_MEETING_MESSAGES = (
    "; messages of both directions that wait for each other belong in batch_isend_irecv, or need the option "
    "duplex_messages"
)

_BROKEN_LINKS = frozenset({NcclStatus.REMOTE_ERROR, NcclStatus.SYSTEM_ERROR, NcclStatus.TIMEOUT})
"""What NCCL says when another rank is gone."""


class Failures(Health):
    """The health of a group: what broke it, and what that does to its operations.

    Args:
        store: the group's store.
        rank: this rank.
        size: number of ranks.
        where: rank and group, to stand in front of a message.
        ending: fails all pending operations and stops NCCL; entered once, and left when the other ranks have
            been told, as NCCL may take its time.
        log: the group's; the cause goes there at once, as nobody may ask for it.
    """

    _alone = "The group has no other rank: the device did not get to it"

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        where: str,
        ending: Callable[[], AbstractContextManager[None]],
        log: Log,
    ) -> None:
        super().__init__(store, rank, size, where)
        self._ending = ending
        self.log = log
        self._next_look = 0.0

    def _stop(self, tell: Callable[[], None]) -> None:
        if not self.left:
            self.log.error("the group is broken: %s", str(self.cause).removeprefix(f"{self.where} "))
        with self._ending():
            tell()

    def check_missing(self, what: str, needed: Collection[int] | None = None) -> None:
        """Raises if the group is broken, or has to be; asks the store now and then, however often called."""
        now = time.monotonic()
        if now >= self._next_look or self.cause is not None:
            self._next_look = now + LOOK_SECONDS
            super().check_missing(what, needed)

    def expire_pending(self, pending: PendingOperation) -> None:
        """Fails an operation that passed its time limit, and breaks the group."""
        if pending.error is None:
            self.expire(
                pending.limited, pending.fail, _MEETING_MESSAGES if pending.limited.is_message else ""
            )

    def call_failed(self, pending: PendingOperation, error: Exception) -> Exception:
        """Returns what to raise for a call of NCCL that failed; it breaks the group."""
        if self.cause is not None:
            pending.fail(self.stopped_error(pending.operation))
        if pending.error is None:
            self.failed(pending, error)
        return pending.error or error

    def failed(self, pending: PendingOperation | None, error: Exception) -> None:
        """Breaks the group for an error of NCCL or the device, in an operation or in a communicator."""
        operation = None if pending is None else pending.operation
        what = f"{self.where} {operation or 'the communicator'}:"
        about = {} if operation is None else operation.about
        first = None if pending is None else pending.fail
        if isinstance(error, NcclError) and error.status in _BROKEN_LINKS and (found := self.find_lost()):
            self.break_by(blamed(what, found, about), found, first, elsewhere=True)
            return
        name = "a call" if operation is None else f"its {operation.short}"
        reason = DistBackendError(f"{name} failed: {error}", self.rank, **about)
        broken = DistBackendError(f"{what} {error}", self.rank, **about)
        self.break_by(broken, Departure(self.rank, reason), first)


# ---- Works ---------------------------------------------------------------------------------------------


class KeptBack:
    """Stands for an operation until the end of its coalescing region; whoever waits for it hears of that."""

    def __init__(self, name: str, device: CudaDevice) -> None:
        self._name = name
        self.device = device

    def __getattr__(self, _: str) -> Any:
        raise RuntimeError(f"this {self._name} is part of a coalescing region; wait after its end")


class NcclWork(Work):
    """An operation on CUDA streams.

    ``wait`` makes the current stream wait and returns at once, so that an error that the operation meets
    later is raised by the next use of the Work or the group. It blocks the host for a barrier, with a time
    limit, and where the group was made with ``blocking_wait``.

    After ``wait`` the Work counts as completed, because what the caller issues from then on comes after it.

    An operation of a coalescing region has its Work at once, which can be waited for after the end of the
    region, and as a whole with it.

    Args:
        group: the group, which is kept alive.
        failures: what ends it.
        pending: the operation on its streams, or what stands for it in a coalescing region.
        outputs: its outputs.
        blocks: whether ``wait`` blocks the host.
        source: sender of a receive.
    """

    def __init__(
        self,
        group: object,
        failures: Failures,
        pending: PendingOperation | KeptBack,
        outputs: Sequence[torch.Tensor],
        blocks: bool = False,
        source: int | None = None,
    ) -> None:
        self._group = group
        self._failures = failures
        self._pending: PendingOperation = pending  # type: ignore[assignment]  # or KeptBack, which raises
        self._outputs = outputs
        self._blocks = blocks
        self._source = source
        self._future: Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def bind(self, whole: NcclWork) -> None:
        """Ties the operation of a coalescing region to the Work of the whole."""
        with self._lock:
            self._pending, self._blocks = whole._pending, whole._blocks
            future = self._future
        if future is not None:
            self._complete(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the operation, or blocks until it is done; see the class.

        Args:
            timeout: blocks the host at most this long; the operation goes on where it passes.
        """
        if timeout is not None or self._blocks:
            limit = seconds_to_wait(timeout)
            if limit or self._blocks:
                self._block(limit)
        self.block_current_stream()
        return True

    def block_current_stream(self) -> None:
        """Makes the current stream wait for the operation."""
        pending = self._pending
        stream = pending.device.current_stream()
        if pending.error is None:
            pending.block_stream(stream)
        if pending.error is not None:
            raise pending.error
        pending.waited = True

    def _block(self, limit: float) -> None:
        pending = self._pending
        until = time.monotonic() + limit if limit > 0.0 else float("inf")
        attempt = 0
        while not pending.ended():
            now = time.monotonic()
            if now >= pending.deadline:
                self._failures.expire_pending(pending)
            elif now >= until:
                raise CollectiveTimeoutError(
                    f"{self._failures.where} {pending.operation}: not done after wait({limit:g} s); "
                    "it goes on",
                    **pending.operation.about,
                )
            pause(attempt)
            attempt += 1

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed, or has been waited for."""
        return self._pending.waited or self._pending.ended()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._pending.error

    def _results(self) -> list[torch.Tensor]:
        """Returns the output tensors, complete for the stream that waited."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a finished receive."""
        if self._source is None or not self.is_completed():
            return super().source_rank()
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors.

        On CUDA it is completed from the start, or from the end of the coalescing region on, in the way of
        :meth:`wait`: streams of those who use its value, callbacks among them, wait for the operation.
        """
        with self._lock:
            if self._future is None:
                future = self._pending.device.future()
                if not isinstance(self._pending, KeptBack):
                    self._complete(future)
                self._future = future
            return self._future

    def _complete(self, future: Future[Any]) -> None:
        """Completes a future with the outputs, for which streams wait that use them."""
        pending = self._pending
        # A stream of its own waits for no other operation. In a capture it would be a branch of the graph
        # that nobody joins again.
        relay = pending.streams[0] if pending.captured else pending.device.take_stream(high_priority=False)
        try:
            pending.block_stream(relay)
            with pending.device.using(relay):
                settle(future, pending.error, self._outputs)
        finally:
            if not pending.captured:
                pending.device.give_back(relay, high_priority=False)
