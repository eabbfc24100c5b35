"""The machine and the versions that a measurement was made with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch


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
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
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
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Model", "cpu model"}:
            return value.strip()
    return platform.processor() or "unknown"


def _last_level_cache_bytes() -> int | None:
    """Returns the size of processor 0's largest cache as the kernel reports it."""
    sizes = [
        int(text[:-1]) * 1024
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        for text in _lines(file)
        if text.endswith("K")
    ]
    return max(sizes, default=None)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
