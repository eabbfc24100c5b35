"""What does an all-reduce of the nccl backend cost the host, without a GPU and NCCL?

One rank; every function of CUDA and NCCL is stubbed by one of the C library that does nothing, which the core
calls by its address. All else is what a user's group runs. Frames of Python and calls of C functions are
counted from the call to the end of ``wait()``, and are the same in every run; the time is the median of many
calls without the counting.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final

import torch

import collectives
import collectives._native as _native
from collectives.backends.nccl import ProcessGroupNCCL
from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.library import NcclLibrary
from collectives.core.types import AllreduceOptions
from collectives.registry.backends import GroupOptions

__all__ = ["Cost", "measure"]

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


def measure(calls: int) -> list[Cost]:
    """Returns the cost of the ways to call an all-reduce.

    Args:
        calls: how many of each are timed, 1 or more.
    """
    options = GroupOptions(collectives.HashStore(), 0, 1, group_name="stubbed")
    group = ProcessGroupNCCL(options, _Library("stub", ""), _Device)
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


_NOTHING: Final = ctypes.cast(ctypes.CDLL(None).pthread_mutexattr_destroy, ctypes.c_void_p).value or 0
"""The address of a function of the C library that does nothing and returns 0."""


class _Library(NcclLibrary):
    """NCCL, whose functions do nothing."""

    def _address(self, name: str) -> int:  # noqa: ARG002
        return _NOTHING

    def call(self, name: str, *arguments: Any) -> None:
        pass

    def integer(self, name: str, *arguments: int) -> int:  # noqa: ARG002
        return 23007  # of the version, which alone is asked for


class _Device(CudaDevice):
    """The device of a user's groups; what it asks of torch and CUDA is stubbed."""

    kind: ClassVar[str] = "cpu"

    _raw_stream = {0: 64}.__getitem__

    def _open(self) -> int:
        return 0

    @staticmethod
    def _functions() -> Sequence[int]:
        return [_NOTHING] * len(_native.CudaStreams.functions())

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    @staticmethod
    def reduces_float8() -> bool:
        return True

    def _make_stream(self, high_priority: bool) -> Stream:  # noqa: ARG002
        return 65
