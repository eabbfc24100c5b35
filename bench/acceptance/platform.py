"""What the checks need to know of the devices that they run on."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar, Protocol

from collectives import ProcessGroup
from collectives.core.capabilities import Capabilities

__all__ = ["Graph", "Platform", "load"]


class Graph(Protocol):
    """A CUDA graph, or what stands for one."""

    def capture(self) -> AbstractContextManager[object]:
        """Captures what this thread issues in a ``with`` block, on a stream that is its current one there."""

    def replay(self) -> None:
        """Carries out what was captured, on the current stream; does not block."""

    def reset(self) -> None:
        """Lets what was captured go, after it was carried out."""


class Platform(ABC):
    """Devices, and NCCL or what stands for it; its module calls the one object ``PLATFORM``."""

    kind: ClassVar[str]
    """Type of the device of tensors."""
    backend: ClassVar[str]
    """Name in torch of our backend on that device."""
    peer: ClassVar[str]
    """Backend of torch that the conformance stands beside."""
    compared: ClassVar[tuple[str, str]]
    """Names in :mod:`collectives.bench.comparison` of ours and of torch's, whose times are compared."""
    trained: ClassVar[tuple[str, str]]
    """Names in :mod:`collectives.bench.ddp` of our wrapper and torch's, each over its NCCL."""
    times_tell: ClassVar[bool]
    """Whether times say something of a user's devices."""
    title: ClassVar[str]
    """The platform in words."""

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """Returns why nothing can be checked here and the way out, or ``None``."""

    @abstractmethod
    def prepare(self) -> None:
        """Makes this machine ready; called once, before all else but :meth:`why_unavailable`."""

    @abstractmethod
    def gpus(self) -> Sequence[str]:
        """Returns the names of the devices."""

    @abstractmethod
    def versions(self) -> str:
        """Returns the versions of driver and CUDA.

        Raises:
            RuntimeError: one cannot be told.
        """

    @abstractmethod
    def topology(self) -> str:
        """Returns how the devices are connected.

        Raises:
            RuntimeError: it cannot be told.
        """

    @abstractmethod
    def reaches(self, device: int, peer: int) -> bool:
        """Returns whether a device can access another one's memory."""

    @abstractmethod
    def take(self, rank: int, size: int) -> None:
        """Gives this process the device of a rank; before anything of NCCL is called."""

    def take_for_peer(self, rank: int, size: int) -> None:
        """Gives this process the device of a rank of the peer."""
        self.take(rank, size)

    @abstractmethod
    def make_group(self, store: Any, rank: int, size: int, limit: timedelta, name: str) -> ProcessGroup:
        """Returns a group over NCCL that connects when it is first used; :meth:`take` comes before.

        Args:
            store: shared by the ranks.
            rank: the rank that this process is.
            size: number of ranks.
            limit: time limit of operations.
            name: of the group.
        """

    @property
    @abstractmethod
    def stated(self) -> Capabilities:
        """What our backend states that all its groups can do on such devices."""

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Lets the current stream do nothing for about that long; does not block."""

    @abstractmethod
    def graph(self, mode: str = "thread_local") -> Graph:
        """Returns a new graph that holds nothing.

        Args:
            mode: whom its capture forbids calls that may be unsafe: ``"thread_local"`` the thread that
                captures, ``"global"``, which is torch's own choice, all threads.
        """

    @abstractmethod
    def refusing_to_wait(self) -> AbstractContextManager[object]:
        """Returns a ``with`` block in which an error is raised where this thread would wait for a stream."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until the device of this process has done everything, and raises what went wrong on it."""

    @property
    @abstractmethod
    def tests(self) -> Sequence[str]:
        """Arguments of pytest for the repository's tests of the platform."""

    @property
    @abstractmethod
    def tests_left_out(self) -> str:
        """What :attr:`tests` leave out, and why, in words; empty for nothing."""

    @abstractmethod
    def held(self) -> int:
        """Returns how much of the device communicators hold now, in units of the platform."""

    @property
    @abstractmethod
    def held_tolerance(self) -> int:
        """How much more may be held at the end than at the beginning."""


def load(module: str) -> Platform:
    """Returns the platform of a module."""
    platform: Platform = importlib.import_module(module).PLATFORM
    return platform
