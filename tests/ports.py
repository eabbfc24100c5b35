"""Ports for servers that another process opens later."""

from __future__ import annotations

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
