"""The CUDA devices of this machine, and NVIDIA's NCCL."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final, NoReturn
from unittest import mock

import torch

from collectives import ProcessGroup
from collectives.backends import nccl
from collectives.backends.nccl import providers
from collectives.backends.nccl.device import CudaDevice as NcclDevice
from collectives.backends.nccl.device import why_no_cuda
from collectives.backends.nccl.operations import FLOAT8_VERSION, capabilities_on
from collectives.bench.acceptance.platform import Graph, Platform
from collectives.bench.core.devices import CudaDevice
from collectives.core.capabilities import Capabilities
from collectives.registry.backends import GroupOptions

__all__ = ["PLATFORM", "CudaPlatform"]

_SPARE_BYTES = 64 << 20
_TESTS_OF_MPI: Final = "tests/gpu/test_mpi.py"


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


class CudaPlatform(Platform):
    """One GPU for each rank where there are enough, else GPUs that ranks share."""

    kind: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "collectives"
    peer: ClassVar[str] = "nccl"
    compared: ClassVar[tuple[str, str]] = ("nccl", "torch:nccl")
    trained: ClassVar[tuple[str, str]] = ("ours:nccl", "torch:nccl")
    times_tell: ClassVar[bool] = True
    title: ClassVar[str] = "CUDA devices"

    def why_unavailable(self) -> str | None:
        """Returns why torch has no CUDA device here, and what can be done without one."""
        reason = why_no_cuda()
        return None if reason is None else f"{reason}; --rehearse runs all of it over a double of NCCL"

    def prepare(self) -> None:
        """Does nothing: the driver has."""

    def gpus(self) -> Sequence[str]:
        """Returns the names that the driver gives them."""
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]

    def versions(self) -> str:
        """Returns the driver's version, and the CUDA that torch is built for."""
        driver = CudaDevice().describe([1])["gpu_driver"]
        if driver == "unknown":
            raise RuntimeError("the version of NVIDIA's kernel module cannot be read")
        return f"driver {driver}, CUDA {torch.version.cuda}"

    def topology(self) -> str:
        """Returns what ``nvidia-smi topo -m`` prints."""
        command = shutil.which("nvidia-smi")
        if command is None:
            raise RuntimeError("there is no nvidia-smi here, which comes with the driver")
        done = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"nvidia-smi topo -m ended with status {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout.strip()

    def reaches(self, device: int, peer: int) -> bool:
        """Returns what CUDA says."""
        return torch.cuda.can_device_access_peer(device, peer)

    def take(self, rank: int, size: int) -> None:
        """Makes the rank's GPU the current one."""
        CudaDevice().take(rank, size)
        torch.zeros(1, device="cuda")  # the context, which stays

    def make_group(self, store: Any, rank: int, size: int, limit: timedelta, name: str) -> ProcessGroup:
        """Returns a group of the nccl backend, by the provider that the environment names."""
        return nccl.create(GroupOptions(store, rank, size, timeout=limit, group_name=name))

    @property
    def stated(self) -> Capabilities:
        """Returns the statement of a group of the nccl backend."""
        float8 = providers.load().version() >= FLOAT8_VERSION and NcclDevice.reduces_float8()
        return capabilities_on(self.kind, float8)

    def delay(self, seconds: float) -> None:
        """Lets the current stream count cycles, at most 2 GHz."""
        torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]

    def graph(self, mode: str = "thread_local") -> Graph:
        """Returns a graph of CUDA."""
        return _CudaGraph(mode)

    @contextmanager
    def refusing_to_wait(self) -> Iterator[None]:
        """Lets torch raise where it synchronizes, and torch and our backend where they wait for an event.

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
        """Waits for the device, which raises what its kernels met."""
        torch.cuda.synchronize()

    @property
    def tests(self) -> Sequence[str]:
        """Those with the mark."""
        return ["-m", "gpu", f"--ignore={_TESTS_OF_MPI}", "tests/gpu"]

    @property
    def tests_left_out(self) -> str:
        """The tests of another backend."""
        return f"{_TESTS_OF_MPI}, which needs two MPIs that take CUDA memory, and tests nothing of nccl"

    def held(self) -> int:
        """Returns the bytes of this rank's GPU that are in use, by whomever."""
        free, total = torch.cuda.mem_get_info()
        return total - free

    @property
    def held_tolerance(self) -> int:
        """Bytes that the allocators of torch and CUDA may keep."""
        return _SPARE_BYTES


PLATFORM: Final[Platform] = CudaPlatform()
