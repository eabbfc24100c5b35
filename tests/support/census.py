"""What a process holds that a group could leave behind: descriptors, threads, segments, children, memory.

And what lies in /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

MPI_FOLDER = "collectives-test-mpi-"
"""How the folders there of MPI jobs of the tests begin; the number of the process that made it follows."""


def census() -> dict[str, int]:
    """Counts what this process has open, runs, has mapped and has started."""
    lists = {name: Path(f"/proc/self/{name}") for name in ("fd", "task")}
    links = []
    for link in lists["fd"].iterdir():
        with contextlib.suppress(OSError):  # that of the list itself
            links.append(str(link.readlink()))
    return {
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": len(list(lists["task"].iterdir())),
        "segments": Path("/proc/self/maps").read_text().count("memfd:collectives"),
        "children": sum(len(task.read_text().split()) for task in lists["task"].glob("*/children")),
    }


def growth(before: dict[str, int], seconds: float = 10.0) -> dict[str, int]:
    """Returns what there is more than before, once the kernel has tidied up, a moment later."""
    deadline = time.monotonic() + seconds
    while True:
        more = {name: count - before[name] for name, count in census().items() if count > before[name]}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.01)


def running() -> str:
    """Returns the names of the threads that run, as the kernel has them, and where those of Python are."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ends just now
            names.append(f"{task.name} {(task / 'comm').read_text().strip()}")
    frames = sys._current_frames()
    stacks = [
        f"{thread.name} ({thread.native_id}):\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    ]
    return "\n".join([", ".join(names), *stacks])


def connections() -> int:
    """Returns how many sockets of TCP of this process are connected."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the list itself, and sockets that are not connected
            if str(link.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as copy:
                    if copy.family in {socket.AF_INET, socket.AF_INET6}:
                        copy.getpeername()
                        found += 1
    return found


def segment_bytes() -> int:
    """Returns the memory of the segments that this process shares with other ranks of its machine."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("/memfd:collectives"):
                found += link.stat().st_blocks * 512
    return found


def memory_mib(pid: int | str = "self") -> float:
    """Returns how much memory of its own a process has, shared segments not counted, in MiB."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def shared_memory() -> set[str]:
    """Returns the names of this user's entries of /dev/shm."""
    with contextlib.suppress(OSError):
        user = Path("/proc/self").owner()
        return {entry.name for entry in SHARED_MEMORY.iterdir() if entry.owner() == user}
    return set()


def unused(names: set[str]) -> set[str]:
    """Returns those entries of /dev/shm that no process has mapped or open: other programs' are in use.

    So are folders of MPI jobs whose maker runs, unless it is this process.
    """
    makers = {name: name.removeprefix(MPI_FOLDER).partition("-")[0] for name in names}
    used = {
        name
        for name, maker in makers.items()
        if maker.isdecimal() and int(maker) != os.getpid() and Path("/proc", maker).exists()
    }
    for folder in Path("/proc").glob("[0-9]*") if names else ():
        with contextlib.suppress(OSError):
            maps = (folder / "maps").read_text(errors="replace")
            used |= {name for name in names if f"/dev/shm/{name}" in maps}
            links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
            used |= {name for name in names if f"/dev/shm/{name}" in links}
    return names - used
