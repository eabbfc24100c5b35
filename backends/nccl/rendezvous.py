"""Brings ranks together in the store before a call of NCCL that would wait for a missing one for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from collectives.errors import CollectiveTimeoutError, DistBackendError
from collectives.store.records import as_bytes, as_text, demand, read, written

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
            DistStoreError: somebody else wrote it, as far as the job's secret tells.
        """
        if self._rank == ranks[0]:
            self._publish(key, what, make)
        self._store.set(f"{key}/arrived/{self._rank}", b"1")
        if self._store.add(f"{key}/count", 1) == len(ranks):
            self._store.set(f"{key}/complete", b"1")
        else:
            self._wait(key, ranks, what, limit)
        made, why = read(self._store.get(f"{key}/value"), f"{key}/value", _made)
        if why:
            raise DistBackendError(
                f"{self._where} {what}: rank {ranks[0]} could not begin it: {why}", ranks[0]
            )
        return made

    def _publish(self, key: str, what: str, make: Callable[[], bytes]) -> None:
        def publish(made: bytes, why: str) -> None:
            self._store.set(f"{key}/value", written([made.hex(), why], f"{key}/value"))

        try:
            publish(make(), "")
        except Exception as error:
            publish(b"", str(error) or type(error).__name__)
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


def _made(record: Any) -> tuple[bytes, str]:
    """Checks what the first rank has made, and why it could not."""
    demand(isinstance(record, list) and len(record) == 2, f"{record!r}")
    return as_bytes(record[0]), as_text(record[1])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
