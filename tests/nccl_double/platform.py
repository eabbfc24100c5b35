"""The double as a platform of ``collectives accept --rehearse``: ranks on tensors of the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch

from collectives import ProcessGroup
from collectives.backends.nccl.operations import capabilities_on
from collectives.bench.acceptance.platform import Platform
from collectives.core.capabilities import Capabilities
from collectives.torch_bridge import register_backend
from nccl_double import build, device
from nccl_double.device import DoubleDevice, tensors_on_device
from nccl_double.groups import host_refusing_to_wait, load, make_group, register_over_double

FILE_VARIABLE = "COLLECTIVES_TEST_NCCL_DOUBLE"
"""Environment variable with the file of the double, for the ranks."""


def _file() -> Path:
    return Path(os.environ[FILE_VARIABLE])


_for_good = contextlib.ExitStack()
"""What a rank has entered, and leaves with its process."""


class DoublePlatform(Platform):
    """Streams are threads, and NCCL is the double; see :mod:`nccl_double`."""

    kind: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "over_double"
    peer: ClassVar[str] = "gloo"
    compared: ClassVar[tuple[str, str]] = ("gloo", "torch:gloo")  # the double has no such time
    trained: ClassVar[tuple[str, str]] = ("ours:gloo", "torch:gloo")
    times_tell: ClassVar[bool] = False
    tests = ("tests/backends/nccl/test_cuda_runtime.py", "tests/backends/nccl/test_rendezvous.py")
    tests_left_out = "all that pytest runs without a GPU anyway"
    held_tolerance = 0
    title: ClassVar[str] = "a rehearsal over the double of NCCL, without a GPU"

    def why_unavailable(self) -> str | None:
        if torch.version.cuda is not None:
            return "torch is built for CUDA and has loaded NCCL, beside which no double can stand"
        return None

    def prepare(self) -> None:
        folder = Path(__file__).parents[2] / "build" / "nccl_double"
        file = os.environ.setdefault(FILE_VARIABLE, "") or str(build(folder))
        os.environ[FILE_VARIABLE] = file
        load(Path(file))

    def gpus(self) -> Sequence[str]:
        return ["double of a GPU", "double of a GPU"]

    def versions(self) -> str:
        return "no driver, no CUDA"

    def topology(self) -> str:
        return "unix sockets"

    def reaches(self, device: int, peer: int) -> bool:
        return True

    def take(self, rank: int, size: int) -> None:
        file = _file()
        load(file)
        register_over_double(self.backend, file, None)
        register_backend(self.backend, self.backend)
        _for_good.enter_context(DoubleDevice.shared(torch.device("cpu")).activate())
        _for_good.enter_context(tensors_on_device())

    def take_for_peer(self, rank: int, size: int) -> None:
        pass

    def make_group(self, store: Any, rank: int, size: int, limit: timedelta, name: str) -> ProcessGroup:
        group: ProcessGroup = make_group(_file(), None, rank, size, store, timeout=limit, group_name=name)
        return group

    @property
    def stated(self) -> Capabilities:
        return capabilities_on("cpu", float8=True)

    def delay(self, seconds: float) -> None:
        shared = DoubleDevice.shared(torch.device("cpu"))
        assert isinstance(shared, DoubleDevice)
        shared.sleep(shared.current_stream(), seconds)

    def graph(self, mode: str = "thread_local") -> device.Graph:
        return device.Graph(mode)

    def refusing_to_wait(self) -> AbstractContextManager[None]:
        return host_refusing_to_wait()

    def finish(self) -> None:
        """Raises, too, where operations accessed memory in no order."""
        shared = DoubleDevice.shared(torch.device("cpu"))
        assert isinstance(shared, DoubleDevice)
        shared.synchronize(shared.current_stream())
        found = device.races()
        assert not found, found

    def held(self) -> int:
        return load(_file()).communicators()


PLATFORM = DoublePlatform()
