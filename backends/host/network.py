"""Where a rank runs and listens, and whether others still do: their deaths show so while a group forms."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import collectives._native as _native
from collectives.errors import PeerLostError
from collectives.store.process import system
from collectives.store.tcp.listen import ports_to_try

_LABEL = "COLLECTIVES_HOST_MACHINE"
_CHECK_AFTER_S = 0.2
"""How long a rank waits for others before it tries whether they still listen."""
_REFUSAL_S = 0.4
"""How long connections have to be refused before the one who listened is taken for dead."""
_AT_A_TIME = 8
_TURN_S = 0.1
"""How often the next ones are tried, and how long one may take."""


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


class KnownListeners:
    """The ranks of other machines that have said where they listen."""

    def __init__(self) -> None:
        self.places: dict[int, list[Sequence[Any]]] = {}
        """Addresses and ports of each rank, the first of which is tried."""
        self._refused: dict[int, float] = {}

    def check(self, ranks: Sequence[int], since: float) -> None:
        """Tries whether some of the ranks still listen; blocks for less than a second.

        Args:
            ranks: the ranks that this one waits for; those without known places are left out.
            since: when it began to wait, by ``time.monotonic()``; at first nothing is tried.

        Raises:
            PeerLostError: a rank has refused connections for a while, so nothing listens there any more.
        """
        now = time.monotonic()
        if now < since + _CHECK_AFTER_S:
            return
        known = [rank for rank in ranks if rank in self.places]
        first = int(now / _TURN_S) * _AT_A_TIME % max(len(known), 1)
        for rank in (known[first:] + known[:first])[:_AT_A_TIME]:
            if not _refuses(self.places[rank][0]):
                self._refused.pop(rank, None)
            elif now - self._refused.setdefault(rank, now) >= _REFUSAL_S:
                raise PeerLostError(
                    f"rank {rank} has died while the group was formed, or a firewall rejects connections "
                    f"to {self.places[rank][0]}",
                    rank,
                )


def _refuses(address: Sequence[Any]) -> bool:
    """Returns whether nobody listens at an address and port, as far as that shows soon."""
    try:
        # Whoever listens drops a connection that ends without a word.
        socket.create_connection(tuple(address), timeout=_TURN_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # says nothing about the rank; the time limit does
    return False
