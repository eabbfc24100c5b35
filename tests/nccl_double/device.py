"""The device of the nccl backend over the double, so that groups run on tensors of the CPU.

It is the device of the product, which calls the double's functions in place of CUDA's, and torch's over it
(:mod:`nccl_double.cuda`). Streams are threads, which run behind the calls as a GPU does. So is the default
one, which all threads share, the current one unless ``using`` says otherwise. What torch's own operations do
there: :mod:`nccl_double.modes`; without those modes, as on threads of ours, tensors are used as they are, and
what the product asks of torch for them is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from collectives.backends.nccl.device import CudaDevice, Event, addresses_in
from collectives.backends.nccl.watchdog import Watchdog
from nccl_double import accesses, do, loaded_from
from nccl_double.calls import current_stream, enqueue, is_capturing, pool_stream, thread
from nccl_double.cuda import DEVICE, Graph
from nccl_double.futures import DoubleFuture
from nccl_double.memory import give_back, give_out, poison
from nccl_double.modes import Steps, on_device, races, tensors_on_device

__all__ = ["DoubleDevice", "Graph", "pool_stream", "races", "tensors_on_device"]


class DoubleDevice(CudaDevice):
    """The CPU with the double's streams."""

    kind = "cpu"
    number: ClassVar[int] = DEVICE
    priorities: ClassVar[list[bool]] = []
    """Of the streams that were made, whether they should have a high priority."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        stub = torch._C._cuda_getCurrentRawStream  # type: ignore[attr-defined]
        self.current_stream = partial(stub, self.number)

    def _open(self) -> int:
        return self.number

    @staticmethod
    def _functions() -> Sequence[int]:
        return addresses_in(str(*loaded_from))

    @classmethod
    def shared(cls, device: torch.device) -> CudaDevice:
        # Groups are bound to cpu:0, as torch wants an index, and tensors are on cpu.
        return super().shared(torch.device("cpu") if device.index == 0 else device)

    @classmethod
    def of_rank(cls, rank: int) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def reduces_float8() -> bool:
        return True

    def _make_stream(self, high_priority: bool) -> int:
        self.priorities.append(high_priority)
        return super()._make_stream(high_priority)

    def run(self, stream: int, function: Callable[[], object]) -> None:
        if on_device():
            super().run(stream, function)
        else:
            self.call(stream, function)

    def empty(self, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        made = super().empty(stream, count, dtype)
        if not on_device():
            give_out(made, stream)
        return made

    def drop(self, tensors: list[torch.Tensor]) -> None:  # type: ignore[override]
        stream = current_stream()
        if is_capturing():  # the graph's own memory
            thread.graph.kept.append(list(tensors))
            tensors.clear()
        else:
            give_back(tensors)
            enqueue(stream, lambda: poison(tensors))  # which the double still uses until then

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return super().pinned(shape, dtype)
        except RuntimeError:  # without the double's operations, or within one of them
            return torch.empty(shape, dtype=dtype)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        if on_device():
            return super().to_host(tensor)
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        stream = current_stream()
        given = tensor.detach()
        ranges = [*accesses.of_tensor(given, False), *accesses.of_tensor(values, True)]
        enqueue(stream, lambda: values.copy_(given), "copy to the host", ranges)
        with self.activate():
            return values, self.record(stream)

    def future(self) -> torch.futures.Future[Any]:
        return super().future() if on_device() else DoubleFuture(devices=[self.device])

    # ---- what tests do -----------------------------------------------------------------------------------

    def done(self, event: Event) -> bool:
        """Returns whether a stream has got to the event."""
        return event.done()

    def wait(self, stream: int, event: Event) -> None:
        """Makes a stream wait for the event."""
        event.wait(stream)

    def call(self, stream: int, function: Callable[[], object]) -> None:
        """Lets a stream call a function."""

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


def watch_as_one() -> None:
    """Lets all threads know what watchdogs are told of events, who note it where users' threads look."""
    run = Watchdog._run

    def tell(watchdog: Watchdog) -> None:
        do("tell", 1)
        run(watchdog)

    Watchdog._run = tell  # type: ignore[method-assign]
