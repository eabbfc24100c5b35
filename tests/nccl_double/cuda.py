"""torch's functions of CUDA, and its graphs, over the double's streams: a torch without CUDA lacks them.

Streams come from a pool of 32, as torch's do, which begins again after the last: see :func:`pool_stream`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from nccl_double import CUDA_ERRORS, ask, do, memory
from nccl_double.calls import captured, current_stream, thread

DEVICE = 1
"""The number of the one device that has streams; threads begin on another rank's, device 0."""


class ExternalStream:
    """As ``torch.cuda.ExternalStream``."""

    def __init__(self, stream: int, device: object) -> None:
        del device
        self.cuda_stream = stream


@contextlib.contextmanager
def _device(_: object) -> Iterator[None]:
    """As ``torch.cuda.device``."""
    before = do("set_device", DEVICE)
    try:
        yield
    finally:
        do("set_device", before)


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    """As ``torch.cuda.stream``: makes the stream's device the current one, too."""
    before = current_stream()
    with _device(None):
        thread.stream = stream.cuda_stream
        try:
            yield
        finally:
            thread.stream = before


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    memory.share(tensor, stream.cuda_stream)


class Graph:
    """Operations that can be carried out again and again, as a ``torch.cuda.CUDAGraph``.

    Args:
        mode: what the capture forbids to whom, as ``capture_error_mode`` of ``torch.cuda.graph``.
    """

    def __init__(self, mode: str = "global") -> None:
        self._mode = ("global", "thread_local", "relaxed").index(mode)
        self.calls: list[int] = []
        self.kept: list[object] = []
        self._number = 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Captures what this thread does, on a new stream that becomes the current one."""
        before, stream = current_stream(), do("stream_create")
        do("stream_synchronize", before)
        do("capture_begin", stream, self._mode)
        thread.stream, thread.graph = stream, self
        try:
            yield
        finally:
            thread.stream, thread.graph = before, None
            ended = ask("capture_end", stream)
        self._number = ended
        if ended < 0:
            raise RuntimeError(f"the capture has failed: {CUDA_ERRORS[-ended]} ({-ended})")

    def replay(self) -> None:
        """Carries the graph out on the current stream, behind what that holds; does not block."""
        do("graph_launch", self._number, current_stream())

    def reset(self) -> None:
        """Lets the graph go, after what was replayed."""
        do("stream_synchronize", current_stream())
        do("graph_destroy", self._number)
        for number in self.calls:
            del captured[number]
        self.calls, self.kept = [], []


def install() -> None:
    """Puts them in torch's place."""
    torch._C._cuda_getCurrentRawStream = lambda _: current_stream()  # type: ignore[attr-defined]
    torch.cuda.ExternalStream = ExternalStream  # type: ignore[assignment, misc]
    torch.cuda.stream = _stream  # type: ignore[assignment]
    torch.cuda.device = _device  # type: ignore[assignment, misc]
    torch.Tensor.record_stream = _record_stream  # type: ignore[assignment, method-assign]
