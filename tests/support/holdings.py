"""What a process holds that its groups need: descriptors, connections, threads, memory."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_SEGMENT = "/memfd:collectives"


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds at one time.

    Attributes:
        descriptors: that are open.
        connections: sockets of TCP among them that are connected.
        threads: that run.
        own_bytes: memory of its own that it has touched, apart from shared segments. What it has had since
            the fork counts as well, so that only differences tell.
        segment_bytes: memory of the segments that it shares with other ranks of its machine; the same on
            each of them.
    """

    descriptors: int
    connections: int
    threads: int
    own_bytes: int
    segment_bytes: int


def holdings() -> Holdings:
    """Returns what this process holds."""
    descriptors = connections = segment_bytes = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed, of many
        with contextlib.suppress(OSError):  # that of the folder itself, closed since
            link = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - likewise
            descriptors += 1
            if link.startswith("socket:"):
                connections += _is_connection(int(name))
            elif link.startswith(_SEGMENT):
                segment_bytes += os.fstat(int(name)).st_blocks * 512
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    return Holdings(descriptors, connections, threads, _own_bytes(), segment_bytes)


def _is_connection(descriptor: int) -> bool:
    """Returns whether a socket is of TCP and connected."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        try:
            copy.getpeername()
        except OSError:
            return False
        return True


def _own_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no RssAnon of this process")
