"""The devices that measured tensors can be on: what a rank does to be on one, and when a call there is over.

A call on the CPU is over when it returns. One on a CUDA device has been issued then, and is over when the
device has nothing left to do, which is what the time of a call counts to.

Several ranks can share a GPU (:mod:`collectives.ranks.cuda_devices`). That shows that peers are right and
what their calls cost the host, but not the bandwidth of the device.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from collectives.backends.nccl.device import why_no_cuda
from collectives.bench.core.records import check_known
from collectives.ranks.cuda_devices import shared_gpu_environment, take_cuda_device
from collectives.registry.backends import BackendSpec


def usable_cores() -> int:
    """Returns the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_of_ranks(ranks: int) -> tuple[int, ...]:
    """Returns a processor for each rank, of those that this process may run on.

    Raises:
        ValueError: there are fewer.
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        raise ValueError(f"{ranks} ranks cannot have a core each: {len(cores)} can be used; do not bind")
    return tuple(cores[:ranks])


def memory_available_bytes() -> int:
    """Returns how much memory the kernel thinks can be had without swapping."""
    available = _fields("/proc/meminfo").get("MemAvailable")
    if available is not None:
        return int(available.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def mpi_version() -> str:
    """Returns the versions of mpi4py and of the MPI that it uses, and where that is.

    Such as ``"mpi4py 4.1.2, Open MPI 5.0.11, /opt/lib/libmpi.so.40"``, whatever wheel or system it is of.
    """
    import mpi4py
    from mpi4py import MPI

    said = " ".join(MPI.Get_library_version().split(",", maxsplit=1)[0].replace("\0", "").split())
    mpich = re.match(r"MPICH Version: (\S+)", said)
    library = f"MPICH {mpich[1]}" if mpich else re.sub(r" v(?=\d)", " ", said)[:60]
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [line.split(maxsplit=5)[5] for line in maps if "/libmpi" in line]
    file = next((file for file in files if re.match(r"libmpi(ch)?\.so", Path(file).name)), None)
    return ", ".join(filter(None, [f"mpi4py {mpi4py.__version__}", library, file]))


def describe_machine() -> dict[str, Any]:
    """Returns machine, processor, memory, load and versions as plain values."""
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cores_usable": usable_cores(),
        "cores_online": os.cpu_count(),
        "cache_last_level_bytes": _last_level_cache_bytes(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": os.getloadavg()[0],
        "tcp_congestion_control": " ".join(_lines(Path("/proc/sys/net/ipv4/tcp_congestion_control"))),
        "python": platform.python_version(),
        "collectives": importlib.metadata.version("torch-collectives"),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    said = _fields("/proc/cpuinfo")
    names = (said.get(name) for name in ("model name", "Model", "cpu model"))
    return next(filter(None, names), platform.processor() or "unknown")


def _last_level_cache_bytes() -> int | None:
    """Returns the size of processor 0's largest cache as the kernel reports it."""
    sizes = [
        int(text[:-1]) * 1024
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        for text in _lines(file)
        if text.endswith("K")
    ]
    return max(sizes, default=None)


def _fields(file: str) -> dict[str, str]:
    """Returns what a file of the kernel says by name, line by line."""
    parts = (line.partition(":") for line in _lines(Path(file)))
    return {name.strip(): value.strip() for name, _, value in parts}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


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

    def finish(self) -> None:
        """Waits until the device is done with all that it was given."""

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

    def finish(self) -> None:
        """Waits for the device, for all its streams."""
        torch.cuda.synchronize()

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
    return int(_fields("/proc/self/status")[field].split()[0]) * 1024


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
    check_known("device", [kind], DEVICES)
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
