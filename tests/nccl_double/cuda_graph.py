"""CUDA graphs over the double."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nccl_double.calls import CUDA_ERRORS, captured, current_stream, do, functions, thread


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
            ended = int(functions["capture_end"](stream))
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
