"""Whether processes of other machines still listen: their deaths show so while a group forms."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from collectives.errors import PeerLostError

_CHECK_AFTER_S = 0.2
"""How long a rank waits for others before it tries whether they still listen."""
_REFUSAL_S = 0.4
"""How long connections have to be refused before the one who listened is taken for dead."""
_AT_A_TIME = 8
_LONGEST_TRY_S = 0.1
_PAUSE_S = 0.1
_SHARE = 0.1
_MANY = 16
"""How long a rank that listens is left alone: a share of the time that was waited so far, as each try stays
in its backlog until it accepts; longer where more than so many ranks are tried, which then try each other."""


class KnownListeners:
    """The ranks that have said where they listen.

    Args:
        rank: this rank; each begins with another one.
    """

    def __init__(self, rank: int) -> None:
        self.places: dict[int, list[Sequence[Any]]] = {}
        """Addresses and ports of each rank, the first of which is tried."""
        self._rank = rank
        self._refused: dict[int, float] = {}
        self._due: dict[int, float] = {}

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
        pause = max(_PAUSE_S, _SHARE * (now - since)) * max(1.0, len(known) / _MANY)
        due = [rank for rank in known if self._due.get(rank, 0.0) <= now]
        for rank in sorted(due, key=self._urgency)[:_AT_A_TIME]:
            if not _refuses(self.places[rank][0]):
                self._refused.pop(rank, None)
                self._due[rank] = now + pause
            elif now - self._refused.setdefault(rank, now) >= _REFUSAL_S:
                raise PeerLostError(
                    f"rank {rank} has died while the group was formed, or a firewall rejects connections "
                    f"to {self.places[rank][0]}",
                    rank,
                )

    def _urgency(self, rank: int) -> tuple[bool, float, bool, int]:
        """Puts those first that have refused a connection, then who has been left alone for longest."""
        return rank not in self._refused, self._due.get(rank, 0.0), rank < self._rank, rank


def nobody_listens(address: Sequence[Any]) -> bool:
    """Returns whether nobody listens any more at an address and port where a process has; blocks a moment."""
    end = time.monotonic() + _REFUSAL_S
    while not (gone := _refuses(address)) and time.monotonic() < end:
        time.sleep(_REFUSAL_S / 8)
    return gone


def _refuses(address: Sequence[Any]) -> bool:
    """Returns whether nobody listens at an address and port, as far as that shows soon."""
    try:
        # Whoever listens drops a connection that ends without a word.
        socket.create_connection(tuple(address), timeout=_LONGEST_TRY_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # says nothing about the rank; the time limit does
    return False
