"""The devices that measured tensors can be on: what a rank does to be on one, and when a call there is over.

A call on the CPU is over when it returns. One on a CUDA device has been issued then, and is over when the
device has nothing left to do, which is what the time of a call counts to.

Several ranks can share a GPU (:mod:`collectives.ranks.cuda_devices`). That shows that peers are right and
what their calls cost the host, but not the bandwidth of the device.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from collectives.backends.nccl.device import why_no_cuda
from collectives.bench.core.machine import memory_available_bytes
from collectives.ranks.cuda_devices import shared_gpu_environment, take_cuda_device
from collectives.registry.backends import BackendSpec

CONTEXT_BYTES = 1 << 30
"""GPU memory that a rank needs besides its tensors: the context of CUDA, and the buffers of two peers."""

_DRIVER = Path("/proc/driver/nvidia/version")


def numbers_of_ranks(gpus: int) -> Sequence[int]:
    """Returns 2, 3 and one rank for each GPU, as far as each rank has one; else 2, which share."""
    return sorted({ranks for ranks in (2, 3, gpus) if 2 <= ranks <= gpus}) or [2]


class Device:
    """The CPU, and what a measurement needs to know of a kind of device."""

    kind: ClassVar[str] = "cpu"
    """Type of the device, and where a rank's tensors are made."""
    runs_behind: ClassVar[bool] = False
    """Whether a call may return before the device is done with it."""

    def why_unavailable(self) -> str | None:
        """Returns why there is none here, ``None`` where there is."""
        return None

    def take(self, rank: int, ranks: int) -> None:
        """Gives this process the device of one of so many ranks; before its groups are made."""

    def memory_per_rank_bytes(self, ranks: int) -> int:
        """Returns the memory that the tensors of each of so many ranks may take, without swapping."""
        return memory_available_bytes() // ranks

    def held_bytes(self) -> int:
        """Returns the memory that this process has now where a rank's tensors are."""
        return _status_bytes("VmRSS")

    def most_held_bytes(self) -> int:
        """Returns the most that :meth:`held_bytes` has ever been."""
        return _status_bytes("VmHWM")

    def describe(self, ranks: Sequence[int]) -> dict[str, Any]:  # noqa: ARG002
        """Returns what the machine's description leaves out of the devices of runs of so many ranks."""
        return {}

    def starting(self, barrier: Callable[[], None]) -> Callable[[], None]:
        """Returns the barrier that ranks leave with nothing under way on their devices."""
        return barrier

    def completing(self, call: Callable[[], object]) -> Callable[[], object]:
        """Returns the call with the wait until the device is done with it and all that came before."""
        return call

    def mark(self) -> Any:
        """Returns a point in time: when the device has done what this thread has issued to it so far."""
        return time.perf_counter_ns()

    def between_ns(self, first: Any, last: Any) -> int:
        """Returns the nanoseconds between two marks; blocks until the device has reached the later one."""
        return int(last - first)


class CudaDevice(Device):
    """The GPUs of this machine: one for each rank where there are enough, else each shared by several."""

    kind: ClassVar[str] = "cuda"
    runs_behind: ClassVar[bool] = True

    def why_unavailable(self) -> str | None:
        """Returns why torch has no CUDA device here."""
        return why_no_cuda()

    def take(self, rank: int, ranks: int) -> None:
        """Makes a rank's GPU the current one, and prepares NCCL where GPUs are shared."""
        take_cuda_device(rank, ranks)

    def memory_per_rank_bytes(self, ranks: int) -> int:
        """Returns the smallest share of a GPU's free memory, without what is no tensor's."""
        gpus = torch.cuda.device_count()
        sharing = Counter(rank % gpus for rank in range(ranks))
        shares = (torch.cuda.mem_get_info(gpu)[0] // number for gpu, number in sharing.items())
        return max(0, min(shares) - CONTEXT_BYTES)

    def held_bytes(self) -> int:
        """Returns what torch's allocator has taken from the GPU."""
        return torch.cuda.memory_reserved()

    def most_held_bytes(self) -> int:
        """Returns what torch's allocator had taken at most."""
        return torch.cuda.max_memory_reserved()

    def describe(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Returns names of GPUs and driver, and the runs that share GPUs with the environment of those."""
        gpus = torch.cuda.device_count()
        described: dict[str, Any] = {
            "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(min(gpus, max(ranks)))],
            "gpu_driver": _driver_version(),
            "cuda": torch.version.cuda,
        }
        if shared := [number for number in ranks if number > gpus]:
            described["gpus_shared_by_ranks"] = shared
            described["gpus_shared_environment"] = shared_gpu_environment(0, os.environ) | {
                "NCCL_HOSTID": "rank<rank>"
            }
        return described

    def starting(self, barrier: Callable[[], None]) -> Callable[[], None]:
        """Returns the barrier behind a wait for the device."""

        def start() -> None:
            torch.cuda.synchronize()
            barrier()

        return start

    def completing(self, call: Callable[[], object]) -> Callable[[], object]:
        """Returns the call before a wait for the device, which sees all streams."""

        def complete() -> None:
            call()
            torch.cuda.synchronize()

        return complete

    def mark(self) -> Any:
        """Returns an event behind what the current stream has been given."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_ns(self, first: Any, last: Any) -> int:
        """Returns the time between two events."""
        last.synchronize()
        return int(first.elapsed_time(last) * 1e6)


def _status_bytes(field: str) -> int:
    """Returns what the kernel says of this process's memory: ``VmRSS`` for now, ``VmHWM`` for the peak."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {field}")


def _driver_version() -> str:
    """Returns the version of NVIDIA's kernel module, as it says itself."""
    try:
        said = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", said)
    return version[1] if version else "unknown"


def check_device(kind: str) -> None:
    """Checks that tensors can be on a device of this machine.

    Raises:
        ValueError: there is no such kind, or none here.
    """
    if kind not in DEVICES:
        raise ValueError(f"unknown device {kind!r}; known are {', '.join(DEVICES)}")
    reason = DEVICES[kind].why_unavailable()
    if reason is not None:
        raise ValueError(f"tensors on {kind} cannot be measured here: {reason}")


def why_not_on(kind: str, spec: BackendSpec) -> str | None:
    """Returns why a backend cannot serve tensors on a device; ``None`` where it can."""
    if kind in spec.devices:
        return None
    here = "the CPU" if kind == "cpu" else kind
    return f"serves tensors on {', '.join(spec.devices)}, and this measures tensors on {here}"


DEVICES: Final[Mapping[str, Device]] = {device.kind: device for device in (Device(), CudaDevice())}
"""The devices by name."""
