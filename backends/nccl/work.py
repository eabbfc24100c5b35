"""Works of the nccl backend: an operation on CUDA streams, and one of a coalescing region."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.futures import Future

from collectives.backends.nccl.device import CudaDevice
from collectives.backends.nccl.operations.in_flight import PendingOperation, pause
from collectives.core.arguments.validation import Group
from collectives.core.work import Work, settle
from collectives.errors import CollectiveTimeoutError
from collectives.time_limits import seconds_to_wait

__all__ = ["CoalescedOperationWork", "NcclWork", "Owner"]


class Owner(Group, Protocol):
    """The part of the group that its operations and Works use."""

    def where(self) -> str:
        """Returns rank and group, to stand in front of a message."""

    def expire(self, pending: PendingOperation) -> None:
        """Fails an operation that passed its time limit."""


class NcclWork(Work):
    """An operation on CUDA streams.

    ``wait`` makes the current stream wait and returns at once, so that an error that the operation meets
    later is raised by the next use of the Work or the group. It blocks the host for a barrier, with a time
    limit, and where the group was made with ``blocking_wait``.

    After ``wait`` the Work counts as completed, because what the caller issues from then on comes after it.

    Args:
        owner: the group.
        pending: the operation on its streams.
        outputs: its outputs.
        blocks: whether ``wait`` blocks the host.
        source: sender of a receive.
    """

    def __init__(
        self,
        owner: Owner,
        pending: PendingOperation,
        outputs: Sequence[torch.Tensor],
        blocks: bool = False,
        source: int | None = None,
    ) -> None:
        self._owner = owner
        self._pending = pending
        self._outputs = outputs
        self._blocks = blocks
        self._source = source
        self._waited = False
        self._future: Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

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
        self._waited = True

    def _block(self, limit: float) -> None:
        pending = self._pending
        until = time.monotonic() + limit if limit > 0.0 else float("inf")
        attempt = 0
        while not pending.ended():
            now = time.monotonic()
            if now >= pending.deadline:
                self._owner.expire(pending)
            elif now >= until:
                raise CollectiveTimeoutError(
                    f"{self._owner.where()} {pending.operation}: not done after wait({limit:g} s); "
                    "it goes on",
                    **pending.operation.about,
                )
            pause(attempt)
            attempt += 1

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed, or has been waited for."""
        return self._waited or self._pending.ended()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._pending.error

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors, complete for the stream that waited."""
        if not self.is_completed():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        if self._pending.error is not None:
            raise self._pending.error
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a finished receive."""
        if self._source is None or not self.is_completed():
            return super().source_rank()
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors.

        On CUDA it is completed from the start, in the way of :meth:`wait`: streams of those who use its
        value, callbacks among them, wait for the operation.
        """
        with self._lock:
            if self._future is None:
                future: Future[Any] = self._pending.device.future()
                self.complete(future, self._outputs)
                self._future = future
            return self._future

    def complete(self, future: Future[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Completes a future with outputs of the operation, for which streams wait that use them."""
        pending = self._pending
        # A stream of its own waits for no other operation. In a capture it would be a branch of the graph
        # that nobody joins again.
        relay = pending.streams[0] if pending.captured else pending.device.take_stream(high_priority=False)
        try:
            pending.block_stream(relay)
            with pending.device.using(relay):
                settle(future, pending.error, outputs)
        finally:
            if not pending.captured:
                pending.device.give_back(relay, high_priority=False)


class CoalescedOperationWork(Work):
    """An operation of a coalescing region, which is enqueued as a whole at its end.

    Args:
        name: name of its user function.
        device: the device of its tensors.
    """

    def __init__(self, name: str, device: CudaDevice) -> None:
        self._name = name
        self._device = device
        self._whole: NcclWork | None = None
        self._outputs: Sequence[torch.Tensor] = ()
        self._source: int | None = None
        self._future: Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def bind(self, whole: NcclWork, outputs: Sequence[torch.Tensor], source: int | None) -> None:
        """Ties the operation to the Work of the region."""
        with self._lock:
            self._whole, self._outputs, self._source = whole, outputs, source
            future = self._future
        if future is not None:
            whole.complete(future, outputs)

    def _ended(self) -> NcclWork:
        if self._whole is None:
            raise RuntimeError(f"this {self._name} is part of a coalescing region; wait after its end")
        return self._whole

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the whole region."""
        return self._ended().wait(timeout)

    def block_current_stream(self) -> None:
        """Makes the current stream wait for the whole region."""
        self._ended().block_current_stream()

    def is_completed(self) -> bool:
        """Returns whether the whole region is done or failed."""
        return self._ended().is_completed()

    def exception(self) -> BaseException | None:
        """Returns the error of the region."""
        return self._ended().exception()

    def result(self) -> list[torch.Tensor]:
        """Returns the outputs of this operation."""
        self._ended().result()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a finished receive."""
        if self._source is None or not self.is_completed():
            return super().source_rank()
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the outputs of this operation, completed with the region; good at once."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = self._device.future()
            whole = self._whole
        if whole is not None:
            whole.complete(future, self._outputs)
        return future
