"""Ports for servers that another process opens later, and who listens where."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nobody has.

    It lies below those that the kernel gives to connections, so that none of these takes it in the meantime.
    """
    end = int(_EPHEMERAL.read_text().split()[0])
    for port in random.sample(range(end // 2, end), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of 100 ports below {end} is free")


def free_ports(count: int) -> range:
    """Returns as many successive ports of 127.0.0.1 that nobody has, chosen as :func:`free_port` does."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return range(first, first + count)


def listening(port, *, own=False):
    """Returns the addresses, as the kernel shows them in hexadecimal, on which somebody listens on a port.

    Others may have the same port of another address; with ``own``, only sockets of this process count.
    """
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the list itself
            mine.add(str(link.readlink()))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            address, _, local_port = local.partition(":")
            if state == "0A" and int(local_port, 16) == port and (not own or f"socket:[{inode}]" in mine):
                found.add(address)
    return found
