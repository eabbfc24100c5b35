"""Faults of the product for the tests of the soak: each spoils the host backend in this process for good."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from collectives.backends.host import ProcessGroupHost
from collectives.errors import DistError


def wrong_result() -> None:
    """Turns over a bit of what rank 1 of a group gets."""
    real = ProcessGroupHost.fast_collective

    def fast_collective(self: ProcessGroupHost, *arguments: Any, **options: Any) -> Any:
        work = real(self, *arguments, **options)
        tensor = arguments[1] if len(arguments) > 1 else None
        if work is not None and self.rank() == 1 and isinstance(tensor, torch.Tensor) and tensor.numel():
            work.wait()
            tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1
        return work

    ProcessGroupHost.fast_collective = fast_collective  # type: ignore[method-assign]


def leak() -> None:
    """Keeps a descriptor open for each group that is shut down."""
    real = ProcessGroupHost.shutdown

    def shutdown(self: ProcessGroupHost) -> None:
        real(self)
        os.dup(0)

    ProcessGroupHost.shutdown = shutdown  # type: ignore[method-assign]


def hang() -> None:
    """Keeps ranks in the end of a group."""

    def shutdown(self: ProcessGroupHost) -> None:
        time.sleep(60)

    ProcessGroupHost.shutdown = shutdown  # type: ignore[method-assign]


def wrong_blame() -> None:
    """Names the next rank in each error."""
    real = DistError.__init__

    def init(self: DistError, message: str = "", rank: int = -1, **more: Any) -> None:
        real(self, message, rank + 1, **more)

    DistError.__init__ = init  # type: ignore[method-assign]
