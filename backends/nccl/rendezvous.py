"""Brings ranks together in the store before a call of NCCL that would wait for a missing one for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from collectives.errors import CollectiveTimeoutError, DistBackendError

__all__ = ["Rendezvous"]

_FIRST_PAUSE = 1e-3
_LONGEST_PAUSE = 20e-3
_CHECK_SECONDS = 1.0


class Rendezvous:
    """Broadcasts through the store that wait for all of their ranks.

    Attributes:
        check_missing: raises if the group has ended meanwhile, or has to because one of the ranks given is
            gone.

    Args:
        store: the group's store.
        rank: this rank.
        where: rank and group, to stand in front of a message.
        check_missing: the attribute; called every second of waiting with the ranks still missing.
    """

    def __init__(
        self, store: Any, rank: int, where: str, check_missing: Callable[[Sequence[int]], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._where = where
        self.check_missing = check_missing

    def broadcast(
        self, key: str, ranks: Sequence[int], what: str, limit: timedelta, make: Callable[[], bytes]
    ) -> bytes:
        """Returns the first rank's value, as soon as all ranks have called; blocks.

        Args:
            key: name of the broadcast; used once.
            ranks: the ranks that call, in the same order on each.
            what: the purpose, in words.
            limit: time limit.
            make: makes the value; called on the first rank.

        Raises:
            CollectiveTimeoutError: ranks did not come in time; names them.
            DistBackendError: the first rank could not make the value.
        """
        if self._rank == ranks[0]:
            self._publish(key, what, make)
        self._store.set(f"{key}/arrived/{self._rank}", b"1")
        if self._store.add(f"{key}/count", 1) == len(ranks):
            self._store.set(f"{key}/complete", b"1")
        else:
            self._wait(key, ranks, what, limit)
        value = bytes(self._store.get(f"{key}/value"))
        if value[:1] == b"!":
            raise DistBackendError(
                f"{self._where} {what}: rank {ranks[0]} could not begin it: {value[1:].decode()}",
                ranks[0],
            )
        return value[1:]

    def _publish(self, key: str, what: str, make: Callable[[], bytes]) -> None:
        try:
            self._store.set(f"{key}/value", b"=" + make())
        except Exception as error:
            self._store.set(f"{key}/value", b"!" + str(error).encode())
            self._store.set(f"{key}/complete", b"1")
            raise DistBackendError(f"{self._where} {what}: {error}") from error

    def _wait(self, key: str, ranks: Sequence[int], what: str, limit: timedelta) -> None:
        began = time.monotonic()
        deadline = began + limit.total_seconds()
        next_check = began + _CHECK_SECONDS
        seconds = _FIRST_PAUSE
        while not self._store.check([f"{key}/complete"]):
            now = time.monotonic()
            if now >= min(deadline, next_check):
                missing = [r for r in ranks if not self._store.check([f"{key}/arrived/{r}"])]
                self.check_missing(missing)
                next_check = now + _CHECK_SECONDS
                if now >= deadline:
                    raise CollectiveTimeoutError(
                        f"{self._where} {what}: {_ranks(missing)} did not come within "
                        f"{limit.total_seconds():g} s; NCCL makes connections in the first operation, in "
                        "which all of them must take part",
                        missing[0] if missing else -1,
                        missing_ranks=missing,
                    )
            time.sleep(seconds)
            seconds = min(seconds * 1.5, _LONGEST_PAUSE)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
