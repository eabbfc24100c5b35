"""torch's functions of CUDA over the double's streams, in place of those that a torch without CUDA lacks.

Streams come from a pool of 32, as torch's do, which begins again after the last: see :func:`pool_stream`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from nccl_double import memory
from nccl_double.calls import current_stream, do, thread

__all__ = ["DEVICE", "install"]

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


def install() -> None:
    """Puts them in torch's place."""
    torch._C._cuda_getCurrentRawStream = lambda _: current_stream()  # type: ignore[attr-defined]
    torch.cuda.ExternalStream = ExternalStream  # type: ignore[assignment, misc]
    torch.cuda.stream = _stream  # type: ignore[assignment]
    torch.cuda.device = _device  # type: ignore[assignment, misc]
    torch.Tensor.record_stream = _record_stream  # type: ignore[assignment, method-assign]
