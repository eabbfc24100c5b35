"""Streams, events and memory of a CUDA device, as torch has them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from collectives.backends.nccl.device.base import Device, Event, Stream
from collectives.backends.nccl.device.cuda_runtime import loaded_runtime

__all__ = ["CudaDevice", "why_no_cuda"]


def why_no_cuda() -> str | None:
    """Returns why torch has no CUDA device here, ``None`` where it has one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with it, see pytorch.org"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; look at the driver (nvidia-smi) and at CUDA_VISIBLE_DEVICES"
    return None


class CudaDevice(Device):
    """A CUDA device.

    Args:
        device: ``cuda`` with an index.

    Raises:
        ValueError: there is none of that number.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if not 0 <= device.index < (count := torch.cuda.device_count()):
            raise ValueError(
                f"there is no {device}: this process sees {count} GPUs, numbered from 0; look at "
                "CUDA_VISIBLE_DEVICES"
            )
        torch.zeros(1, device=device)  # NCCL takes the device's context as it finds it, so there must be one

    @classmethod
    def of_rank(cls, rank: int) -> torch.device:
        """Returns the CUDA device with the rank's number, counted from the first again after the last."""
        return torch.device("cuda", rank % torch.cuda.device_count())

    @staticmethod
    def reduces_float8() -> bool:
        """Returns whether the device is of compute capability 9.0 or more."""
        return torch.cuda.get_device_capability() >= (9, 0)

    def enter(self) -> AbstractContextManager[object] | None:
        """Makes this the calling thread's CUDA device; returns ``None`` where it is already."""
        if torch.cuda.current_device() == self.device.index:
            return None
        before: AbstractContextManager[object] = torch.cuda.device(self.device)
        before.__enter__()
        return before

    def leave(self, before: AbstractContextManager[object] | None) -> None:
        """Goes back to the CUDA device before, unless that has no context, which this does not make."""
        if before is not None:
            before.__exit__(None, None, None)

    def current_stream(self) -> Stream:
        """Returns the calling thread's stream on this device."""
        return torch.cuda.current_stream(self.device)

    def _make_stream(self, high_priority: bool) -> Stream:
        """Returns a stream that the runtime makes, or one of torch's pool where that cannot be found."""
        priority = -1 if high_priority else 0
        runtime = loaded_runtime()
        if runtime is None:
            return torch.cuda.Stream(self.device, priority)  # type: ignore[no-untyped-call]
        made = runtime.make_stream(priority)
        return torch.cuda.ExternalStream(made, self.device)  # type: ignore[no-untyped-call]

    def handle(self, stream: Stream) -> int:
        """Returns the ``cudaStream_t``."""
        return int(stream.cuda_stream)

    def record(self, stream: Stream) -> Event:
        """Returns a new CUDA event without times."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes a stream wait for the event; the host goes on."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """Returns whether the event is done; the GIL is released, and captures of graphs go on."""
        runtime = loaded_runtime()
        return bool(event.query()) if runtime is None else runtime.event_done(event.cuda_event)

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes a stream the current one, and its device the current device."""
        return torch.cuda.stream(stream)

    def run(self, stream: Stream, function: Callable[[], object]) -> None:
        """Calls the function now, with the stream as the current one."""
        with self.using(stream), torch.no_grad():
            function()

    def empty(self, stream: Stream, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory that the caching allocator gives out again only behind the stream's work."""
        with self.using(stream):
            return torch.empty(count, dtype=dtype, device=self.device)

    def share(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Tells the caching allocator of the stream."""
        tensor.record_stream(stream)

    def drop(self, stream: Stream, tensors: list[torch.Tensor]) -> None:  # noqa: ARG002
        """Empties the list now: the caching allocator gives memory out again in the order of its stream."""
        tensors.clear()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Copies to pinned memory, which the device writes to without the host."""
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor.detach(), non_blocking=True)
        return values, self.record(self.current_stream())

    def block(self, event: Event) -> None:
        """Blocks until the event is done."""
        event.synchronize()

    def future(self) -> torch.futures.Future[Any]:
        """Returns a future that makes its users' streams wait for the one that it was completed on."""
        return torch.futures.Future(devices=[self.device])

    def capturing(self) -> bool:
        """Returns whether the current stream is being captured into a CUDA graph."""
        before = self.enter()
        try:
            return torch.cuda.is_current_stream_capturing()
        finally:
            self.leave(before)
