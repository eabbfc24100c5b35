"""Ranks meet in the store before a call of NCCL that would wait for a missing one without any limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from collectives.errors import CollectiveTimeoutError, DistBackendError

__all__ = ["Rendezvous"]

_FIRST_PAUSE = 1e-3
_LONGEST_PAUSE = 20e-3
_LOOK_SECONDS = 1.0


class Rendezvous:
    """Meetings of some ranks of a group, each at a key of its own.

    Args:
        store: the group's store.
        rank: this rank.
        where: rank and group, to stand in front of a message.
        look: raises if the group has ended meanwhile; called every second of waiting with the ranks still
            missing.
    """

    def __init__(self, store: Any, rank: int, where: str, look: Callable[[Sequence[int]], None]) -> None:
        self._store = store
        self._rank = rank
        self._where = where
        self._look = look

    def meet(
        self, key: str, ranks: Sequence[int], what: str, limit: timedelta, make: Callable[[], bytes]
    ) -> bytes:
        """Returns what the first of the ranks brings, as soon as all of them are here; blocks.

        Args:
            key: name of the meeting; used once.
            ranks: the ranks that meet, in the same order on each.
            what: what they meet for, in words.
            limit: time limit.
            make: makes what the first rank brings; called there.

        Raises:
            CollectiveTimeoutError: ranks did not come in time; names them.
            DistBackendError: the first rank could not make what it should bring.
        """
        if self._rank == ranks[0]:
            self._bring(key, what, make)
        self._store.set(f"{key}/here/{self._rank}", b"1")
        if self._store.add(f"{key}/count", 1) == len(ranks):
            self._store.set(f"{key}/complete", b"1")
        else:
            self._wait(key, ranks, what, limit)
        brought = bytes(self._store.get(f"{key}/brought"))
        if brought[:1] == b"!":
            raise DistBackendError(
                f"{self._where} {what}: rank {ranks[0]} could not begin it: {brought[1:].decode()}"
            )
        return brought[1:]

    def _bring(self, key: str, what: str, make: Callable[[], bytes]) -> None:
        try:
            self._store.set(f"{key}/brought", b"=" + make())
        except Exception as error:
            self._store.set(f"{key}/brought", b"!" + str(error).encode())
            self._store.set(f"{key}/complete", b"1")
            raise DistBackendError(f"{self._where} {what}: {error}") from error

    def _wait(self, key: str, ranks: Sequence[int], what: str, limit: timedelta) -> None:
        began = time.monotonic()
        deadline = began + limit.total_seconds()
        next_look = began + _LOOK_SECONDS
        seconds = _FIRST_PAUSE
        while not self._store.check([f"{key}/complete"]):
            now = time.monotonic()
            if now >= min(deadline, next_look):
                missing = [r for r in ranks if not self._store.check([f"{key}/here/{r}"])]
                self._look(missing)
                next_look = now + _LOOK_SECONDS
                if now >= deadline:
                    raise CollectiveTimeoutError(
                        f"{self._where} {what}: {_ranks(missing)} did not come within "
                        f"{limit.total_seconds():g} s; NCCL makes connections in the first operation, in "
                        "which all of them must take part"
                    )
            time.sleep(seconds)
            seconds = min(seconds * 1.5, _LONGEST_PAUSE)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
