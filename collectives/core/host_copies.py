"""Copies of a device's outputs in host memory, whose values may be awaited later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch


class HostCopy(ABC):
    """A copy that was begun; see :meth:`collectives.ProcessGroup.to_host_later`."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether :meth:`result` would not block; never blocks."""

    @abstractmethod
    def result(self) -> torch.Tensor:
        """Returns the values; blocks until they are there.

        Raises:
            DistError: the group broke meanwhile, so that they may be anything.
        """


class LateHostCopy(HostCopy):
    """A copy that is made when its values are asked for, as of tensors on the CPU.

    Args:
        make: makes it, as :meth:`collectives.ProcessGroup.to_host`.
    """

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def done(self) -> bool:
        """Returns ``True``: what the copy waits for is not begun later."""
        return True

    def result(self) -> torch.Tensor:
        """Makes the copy."""
        return self._make()
