"""The Works of operations on CUDA streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from collectives.backends.nccl.device import CudaDevice
from collectives.backends.nccl.failures import Failures
from collectives.backends.nccl.in_flight import PendingOperation, pause
from collectives.core.work import Work, settle
from collectives.errors import CollectiveTimeoutError
from collectives.time_limits import seconds_to_wait

__all__ = ["KeptBack", "NcclWork"]


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
                self._failures.expire(pending)
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
