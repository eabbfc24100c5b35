"""The streams and events of the double of NCCL as a device, so that groups run on tensors of the CPU.

Streams are threads, which run behind the calls as a GPU does. So is the default one, which all threads share,
the current one unless :meth:`DoubleDevice.using` says otherwise. Users' streams come from a pool of 32, as
torch's do, which begins again after the last: see :func:`pool_stream`. What torch's own operations do there:
:mod:`nccl_double.modes`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from collectives.backends.nccl.device import Device
from nccl_double import accesses
from nccl_double.calls import current_stream, do, enqueue, is_capturing, pool_stream, thread, use
from nccl_double.cuda_graph import Graph
from nccl_double.futures import DoubleFuture
from nccl_double.memory import forget, give_back, give_out, poison, share
from nccl_double.modes import Steps, races, tensors_on_device

__all__ = ["DoubleDevice", "Graph", "pool_stream", "races", "tensors_on_device", "use"]


class DoubleDevice(Device):
    """The CPU with the double's streams. It is device 1; threads begin on another rank's, device 0."""

    kind = "cpu"
    number: ClassVar[int] = 1
    priorities: ClassVar[list[bool]] = []
    """Of the streams that were made, whether they should have a high priority."""

    @classmethod
    def shared(cls, device: torch.device) -> Device:
        # Groups are bound to cpu:0, as torch wants an index, and tensors are on cpu.
        return super().shared(torch.device("cpu") if device.index == 0 else device)

    @classmethod
    def of_rank(cls, rank: int) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def reduces_float8() -> bool:
        return True

    def enter(self) -> int:
        return do("set_device", self.number)

    def leave(self, before: int) -> None:
        do("set_device", before)

    def current_stream(self) -> int:
        return current_stream()

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Makes a stream the thread's current one."""
        before, thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            thread.stream = before

    def _make_stream(self, high_priority: bool) -> int:
        self.priorities.append(high_priority)
        return do("stream_create")

    def handle(self, stream: int) -> int:
        return stream

    def record(self, stream: int) -> int:
        event = do("event_create")
        do("event_record", event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        do("event_wait", event, stream)

    def done(self, event: int) -> bool:
        passed = bool(do("event_query", event))
        if passed and threading.current_thread().name.startswith("nccl watchdog"):
            do("event_tell", event)  # it notes what it found where users' threads look
        return passed

    def run(self, stream: int, function: Callable[[], object]) -> None:
        def steps() -> None:
            with Steps():
                function()

        enqueue(stream, steps)

    def sleep(self, stream: int, seconds: float) -> None:
        """Lets a stream do nothing for a while."""
        do("stream_sleep", stream, int(seconds * 1000))

    def synchronize(self, stream: int) -> None:
        """Blocks until a stream has passed what it holds."""
        do("stream_synchronize", stream)

    def empty(self, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(count, dtype=dtype)
        give_out(made, stream)  # a thread of ours may ask, whose operations nobody notes
        return made

    def share(self, stream: int, tensor: torch.Tensor) -> None:
        share(tensor, stream)

    def drop(self, stream: int, tensors: list[torch.Tensor]) -> None:
        if do("capturing", stream):  # the graph's own memory
            thread.graph.kept.append(list(tensors))
            tensors.clear()
        else:
            give_back(tensors)
            enqueue(stream, lambda: poison(tensors))  # which the double still uses until then

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        forget(values)
        accesses.keep_on_host(values)
        stream = self.current_stream()
        given = tensor.detach()
        ranges = [*accesses.of_tensor(given, False), *accesses.of_tensor(values, True)]
        enqueue(stream, lambda: values.copy_(given), "copy to the host", ranges)
        return values, self.record(stream)

    def block(self, event: int) -> None:
        do("event_synchronize", event)

    def future(self) -> torch.futures.Future[Any]:
        return DoubleFuture()

    def capturing(self) -> bool:
        return is_capturing()
