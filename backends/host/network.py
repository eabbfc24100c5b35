"""Where a rank runs and listens, and whether others still do."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import collectives._native as _native
from collectives.store.process import system
from collectives.store.tcp.listen import ports_to_try

__all__ = ["listen", "place", "refuses"]

_LABEL = "COLLECTIVES_HOST_MACHINE"


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


def refuses(address: Sequence[Any], limit_s: float) -> bool:
    """Tells whether nobody listens at an address and port, as far as that shows within the limit."""
    try:
        # Whoever listens drops a connection that ends without a word.
        socket.create_connection(tuple(address), timeout=limit_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # says nothing about the rank; the time limit does
    return False


def place() -> str:
    """Returns what tells machines apart, as far as attaching goes: the boot and the network name space.

    ``COLLECTIVES_HOST_MACHINE`` divides it further: ranks with different labels never share memory.
    """
    label = os.environ.get(_LABEL, "")
    return f"{system()} {label}" if label else system()
