"""Where a rank runs and listens, and whether a socket of its machine is still there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence

import collectives._native as _native
from collectives.store.process import system
from collectives.store.tcp.listen import ports_to_try

_LABEL = "COLLECTIVES_HOST_MACHINE"


def place() -> str:
    """Returns what tells machines apart, as far as attaching goes: the boot and the network name space.

    ``COLLECTIVES_HOST_MACHINE`` divides it further: ranks with different labels never share memory.
    """
    label = os.environ.get(_LABEL, "")
    return f"{system()} {label}" if label else system()


def listen(addresses: Sequence[str], size: int) -> _native.HostListeners:
    """Listens for the ranks of a group.

    Args:
        addresses: numeric addresses of this machine.
        size: number of ranks.

    Raises:
        DistNetworkError: the system refuses, or all ports of ``COLLECTIVES_PORT_RANGE`` are in use.
        ValueError: that variable is no range of ports.
    """
    return _native.HostListeners(addresses, min(max(4 * size, 64), 4096), ports_to_try())


def has_gone(name: str) -> bool:
    """Returns whether nobody listens on a unix socket of this machine any more."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex(f"\0{name}") == errno.ECONNREFUSED
    return False
