"""What does an all-reduce of the nccl backend cost the host, without a GPU and NCCL?

One rank; every call of CUDA and NCCL is stubbed and returns at once: streams and events by methods of Python,
NCCL's functions by one of the C library that does nothing, which the core calls by its address. Frames of
Python, those of the stubs among them, and calls of C functions are counted from the call to the end of
``wait()``, and are the same in every run; the time is the median of many calls without the counting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch

import collectives
from collectives.backends.nccl import ProcessGroupNCCL
from collectives.backends.nccl.device import Device, Event, Stream
from collectives.backends.nccl.libnccl.codes import UNIQUE_ID_BYTES, NcclError
from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.backends.nccl.libnccl.interface import NcclLibrary
from collectives.backends.nccl.libnccl.symbols import Symbols
from collectives.core.types import AllreduceOptions
from collectives.registry.backends import GroupOptions

__all__ = ["Cost", "add_arguments", "measure", "run"]

_WARM_UP = 100
_COUNTED = 20


@dataclass(frozen=True)
class Cost:
    """What one call costs the host.

    Attributes:
        call: the call.
        frames: frames of Python.
        c_calls: calls of C functions by Python.
        microseconds: median time.
    """

    call: str
    frames: int
    c_calls: int
    microseconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument("--calls", type=int, default=5000, metavar="N", help="calls that are timed")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 0."""
    costs = measure(arguments.calls)
    print(f"{'call':32} {'frames':>7} {'C calls':>8} {'us':>7}")
    for cost in costs:
        print(f"{cost.call:32} {cost.frames:7} {cost.c_calls:8} {cost.microseconds:7.1f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
    return 0


def measure(calls: int) -> list[Cost]:
    """Returns the cost of the ways to call an all-reduce.

    Args:
        calls: how many of each are timed, 1 or more.
    """
    options = GroupOptions(collectives.HashStore(), 0, 1, group_name="stubbed")
    group = ProcessGroupNCCL(options, NcclLibrary("stub", _Symbols()), _Device)
    tensor, tensors = torch.ones(8), [torch.ones(8) for _ in range(10)]
    inline = AllreduceOptions(asyncOp=False)
    ways: dict[str, Callable[[], Any]] = {
        "all_reduce, asynchronous": lambda: group.allreduce(tensor).wait(),
        "all_reduce, synchronous": lambda: group.allreduce([tensor], inline).wait(),
        "all_reduce of 10, coalesced": lambda: group.allreduce_coalesced(tensors).wait(),
    }
    try:
        return [Cost(name, *_counted(call), _timed(call, calls)) for name, call in ways.items()]
    finally:
        group.abort()


def _counted(call: Callable[[], object]) -> tuple[int, int]:
    """Returns the frames and the calls of C functions of one call; the fewest of several.

    Some calls wake the watchdog, which sleeps while it has nothing to watch.
    """
    for _ in range(_WARM_UP):
        call()
    return min(_count(call) for _ in range(_COUNTED))


def _count(call: Callable[[], object]) -> tuple[int, int]:
    seen = {"call": -1, "c_call": -1}  # the lambda's frame, and the end of the counting

    def count(_: FrameType, event: str, __: object) -> None:
        if event in seen:
            seen[event] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen["call"], seen["c_call"]


def _timed(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


class _Symbols(Symbols):
    """NCCL's functions; a function of the C library stands for each that does nothing and returns 0."""

    def __init__(self) -> None:
        super().__init__("")

    def _version(self) -> int:
        return 23007

    def _address(self, name: str) -> int:  # noqa: ARG002
        return super()._address("pthread_mutexattr_destroy")

    def unique_id(self) -> bytes:
        return bytes(UNIQUE_ID_BYTES)

    def init(self, unique_id: bytes, size: int, rank: int, config: NcclConfig) -> int:  # noqa: ARG002
        return 1

    def async_error(self, handle: int) -> NcclError | None:  # noqa: ARG002
        return None

    def abort(self, handle: int) -> None:
        pass

    def destroy(self, handle: int) -> None:
        pass


class _Device(Device):
    kind: ClassVar[str] = "cpu"

    @classmethod
    def of_rank(cls, rank: int) -> torch.device:  # noqa: ARG003
        return torch.device("cpu")

    @staticmethod
    def reduces_float8() -> bool:
        return True

    def enter(self) -> int:
        return 0

    def leave(self, before: int) -> None:
        pass

    def current_stream(self) -> Stream:
        return 0

    def _make_stream(self, high_priority: bool) -> Stream:  # noqa: ARG002
        return 1

    def handle(self, stream: Stream) -> int:
        return int(stream)

    def record(self, stream: Stream) -> Event:
        return stream

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def done(self, event: Event) -> bool:  # noqa: ARG002
        return True

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:  # noqa: ARG002
        yield

    def run(self, stream: Stream, function: Callable[[], object]) -> None:  # noqa: ARG002
        function()

    def empty(self, stream: Stream, count: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(count, dtype=dtype)

    def share(self, stream: Stream, tensor: torch.Tensor) -> None:
        pass

    def drop(self, stream: Stream, tensors: list[torch.Tensor]) -> None:  # noqa: ARG002
        tensors.clear()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return tensor.clone(), 0

    def block(self, event: Event) -> None:
        pass

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def capturing(self) -> bool:
        return False
