"""A second link between two machines, over IPv6, on which every frame is under way for a while.

::

    with far_link(machines, seconds=0.05):
        run_ranks(check, 2, ..., machines=(machines, [0, 1]), env={"COLLECTIVES_SOCKET_IFNAME": INTERFACE})

Not every kernel can delay packets (netem); a process that carries frames between two TAP interfaces can.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

import pytest
from preloaded_python import Helper

from collectives.bench.core.namespaces import Machines, enter

INTERFACE = "far0"
NETWORK = "fd00:ca11"
"""The first two groups of the addresses; the last is 1 and 2."""

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_MTU = 9000


@contextlib.contextmanager
def far_link(machines: Machines, seconds: float) -> Iterator[None]:
    """Joins the first two machines for the length of a ``with`` block; frames take ``seconds`` each way."""
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        pytest.skip(f"no TAP interfaces here: {_DEVICE} is missing, or not this user's")
    words = [machines.namespace(0), machines.namespace(1), str(seconds)]
    with Helper(__file__, *words):
        yield


def _interface(namespace: str, number: int) -> int:
    """Returns the descriptor of an interface of a machine, which lives as long as that."""
    enter(namespace)
    end = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI))
    for command in (
        f"link set {INTERFACE} mtu {_MTU} up",
        f"-6 address add {NETWORK}::{number}/64 dev {INTERFACE} nodad",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return end


def _carry(ends: list[int], seconds: float) -> None:
    """Carries frames between two interfaces until the standard input ends."""
    under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    others = dict(zip(ends, reversed(ends), strict=True))
    while True:
        due = [frames[0][0] for frames in under_way.values() if frames]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([sys.stdin, *ends], [], [], patience)
        if sys.stdin in readable:
            return
        now = time.monotonic()
        for end in ends:
            if end in readable:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        under_way[others[end]].append((now + seconds, os.read(end, _MTU + 64)))
            frames = under_way[end]
            while frames and frames[0][0] <= now:
                with contextlib.suppress(OSError):  # the interface is full: a link may lose a frame
                    os.write(end, frames.popleft()[1])


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.nice(-15)  # a network does not wait for a core
    joined = [_interface(namespace, number) for number, namespace in enumerate(sys.argv[1:3], 1)]
    print("ready", flush=True)
    _carry(joined, float(sys.argv[3]))
