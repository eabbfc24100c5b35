"""The devices that the checks run on: the CUDA devices of this machine, and NVIDIA's NCCL."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final, NoReturn, Protocol
from unittest import mock

import torch

from collectives import ProcessGroup
from collectives.backends import nccl
from collectives.backends.nccl import providers
from collectives.backends.nccl.device import CudaDevice as NcclDevice
from collectives.backends.nccl.device import why_no_cuda
from collectives.backends.nccl.operations import FLOAT8_VERSION, capabilities_on
from collectives.bench.core.devices import CudaDevice
from collectives.core.capabilities import Capabilities
from collectives.registry.backends import GroupOptions

_SPARE_BYTES = 64 << 20
_TESTS_OF_MPI: Final = "tests/gpu/test_mpi.py"


class Graph(Protocol):
    """A CUDA graph, or what stands for one."""

    def capture(self) -> AbstractContextManager[object]:
        """Captures what this thread issues in a ``with`` block, on a stream that is its current one there."""

    def replay(self) -> None:
        """Carries out what was captured, on the current stream; does not block."""

    def reset(self) -> None:
        """Lets what was captured go, after it was carried out."""


class _CudaGraph:
    def __init__(self, mode: str) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._mode = mode

    def capture(self) -> AbstractContextManager[object]:
        return torch.cuda.graph(self._graph, capture_error_mode=self._mode)

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        torch.cuda.synchronize()
        self._graph.reset()


class Platform:
    """The GPUs of this machine: one for each rank where there are enough, else shared by several.

    A module of another platform calls its one object ``PLATFORM``, which overrides all of this.
    """

    kind: ClassVar[str] = "cuda"
    """Type of the device of tensors."""
    backend: ClassVar[str] = "collectives"
    """Name in torch of our backend on that device."""
    peer: ClassVar[str] = "nccl"
    """Backend of torch that the conformance stands beside."""
    compared: ClassVar[tuple[str, str]] = ("nccl", "torch:nccl")
    """Names in :mod:`collectives.bench.allreduce` of ours and of torch's, whose times are compared."""
    trained: ClassVar[tuple[str, str]] = ("ours:nccl", "torch:nccl")
    """Names in :mod:`collectives.bench.ddp` of our wrapper and torch's, each over its NCCL."""
    times_tell: ClassVar[bool] = True
    """Whether times say something of a user's devices."""
    title: ClassVar[str] = "CUDA devices"
    """The platform in words."""
    tests: Sequence[str] = ("-m", "gpu", f"--ignore={_TESTS_OF_MPI}", "tests/gpu")
    """Arguments of pytest for the repository's tests of the platform."""
    tests_left_out: str = (
        f"{_TESTS_OF_MPI}, which needs two MPIs that take CUDA memory, and tests nothing of nccl"
    )
    """What :attr:`tests` leave out, and why, in words; empty for nothing."""
    held_tolerance: int = _SPARE_BYTES
    """How much more may be held at the end than at the beginning: what allocators of torch and CUDA keep."""

    def why_unavailable(self) -> str | None:
        """Returns why nothing can be checked here and the way out, or ``None``."""
        reason = why_no_cuda()
        return None if reason is None else f"{reason}; --rehearse runs all of it over a double of NCCL"

    def prepare(self) -> None:
        """Makes this machine ready, which the driver has; called once, after :meth:`why_unavailable`."""

    def gpus(self) -> Sequence[str]:
        """Returns the names of the devices."""
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]

    def versions(self) -> str:
        """Returns the driver's version, and the CUDA that torch is built for.

        Raises:
            RuntimeError: one cannot be told.
        """
        driver = CudaDevice().describe([1])["gpu_driver"]
        if driver == "unknown":
            raise RuntimeError("the version of NVIDIA's kernel module cannot be read")
        return f"driver {driver}, CUDA {torch.version.cuda}"

    def topology(self) -> str:
        """Returns how the devices are connected, as ``nvidia-smi topo -m`` prints it.

        Raises:
            RuntimeError: it cannot be told.
        """
        command = shutil.which("nvidia-smi")
        if command is None:
            raise RuntimeError("there is no nvidia-smi here, which comes with the driver")
        words = [command, "topo", "-m"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            said = done.stderr.strip()
            raise RuntimeError(f"nvidia-smi topo -m ended with status {done.returncode}: {said}")
        return done.stdout.strip()

    def reaches(self, device: int, peer: int) -> bool:
        """Returns whether a device can access another one's memory."""
        return torch.cuda.can_device_access_peer(device, peer)

    def take(self, rank: int, size: int) -> None:
        """Gives this process the device of a rank; before anything of NCCL is called."""
        CudaDevice().take(rank, size)
        torch.zeros(1, device="cuda")  # the context, which stays

    def take_for_peer(self, rank: int, size: int) -> None:
        """Gives this process the device of a rank of the peer."""
        self.take(rank, size)

    def make_group(self, store: Any, rank: int, size: int, limit: timedelta, name: str) -> ProcessGroup:
        """Returns a group over NCCL, by the provider that the environment names; :meth:`take` comes before.

        Args:
            store: shared by the ranks.
            rank: the rank that this process is.
            size: number of ranks.
            limit: time limit of operations.
            name: of the group, which connects when it is first used.
        """
        return nccl.create(GroupOptions(store, rank, size, timeout=limit, group_name=name))

    @property
    def stated(self) -> Capabilities:
        """What our backend states that all its groups can do on such devices."""
        float8 = providers.load().version() >= FLOAT8_VERSION and NcclDevice.reduces_float8()
        return capabilities_on(self.kind, float8)

    def delay(self, seconds: float) -> None:
        """Lets the current stream do nothing for about that long, at most 2 GHz; does not block."""
        torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]

    def graph(self, mode: str = "thread_local") -> Graph:
        """Returns a new graph that holds nothing.

        Args:
            mode: whom its capture forbids calls that may be unsafe: ``"thread_local"`` the thread that
                captures, ``"global"``, which is torch's own choice, all threads.
        """
        return _CudaGraph(mode)

    @contextmanager
    def refusing_to_wait(self) -> Iterator[None]:
        """Raises in a ``with`` block where this thread would wait for a stream, or for an event.

        Of events, torch's own check knows nothing.
        """

        def refuse(*_: object) -> NoReturn:
            raise RuntimeError("this thread would wait for an event")

        events = mock.patch.object(torch.cuda.Event, "synchronize", refuse)
        ours = mock.patch.object(NcclDevice, "block", refuse)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with events, ours:
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def finish(self) -> None:
        """Waits until the device of this process has done everything, and raises what went wrong on it."""
        torch.cuda.synchronize()

    def held(self) -> int:
        """Returns the bytes of this rank's GPU that are in use, by whomever."""
        free, total = torch.cuda.mem_get_info()
        return total - free


PLATFORM: Final = Platform()


def load(module: str) -> Platform:
    """Returns the platform of a module."""
    platform: Platform = importlib.import_module(module).PLATFORM
    return platform
