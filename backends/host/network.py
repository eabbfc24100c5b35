"""Where a rank runs, and whether others still listen."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from collectives.store.process import system

__all__ = ["place", "refuses"]

_LABEL = "COLLECTIVES_HOST_MACHINE"


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
