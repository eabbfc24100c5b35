"""Whether ranks on other machines still listen for connections while a group forms: their deaths show so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from collectives.backends.host.network import refuses
from collectives.errors import PeerLostError

__all__ = ["KnownListeners"]

_CHECK_AFTER_S = 0.2
"""How long a rank waits for others before it tries whether they still listen."""
_REFUSAL_S = 0.4
"""How long connections have to be refused before the one who listened is taken for dead."""
_AT_A_TIME = 8
_TURN_S = 0.1
"""How often the next ones are tried, and how long one may take."""


class KnownListeners:
    """The ranks that have said where they listen."""

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
            if not refuses(self.places[rank][0], _TURN_S):
                self._refused.pop(rank, None)
            elif now - self._refused.setdefault(rank, now) >= _REFUSAL_S:
                raise PeerLostError(
                    f"rank {rank} has died while the group was formed, or a firewall rejects connections "
                    f"to {self.places[rank][0]}",
                    rank,
                )
