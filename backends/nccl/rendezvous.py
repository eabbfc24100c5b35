"""Brings ranks together in the store before a call of NCCL that would wait for a missing one for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from collectives.errors import CollectiveTimeoutError, DistBackendError, ranks_in_words
from collectives.store.records import as_bytes, as_text, demand, fetch, publish
from collectives.store.waiting import wait_for_keys

__all__ = ["Rendezvous"]

_CHECK_SECONDS = 1.0

_GAVE_UP = 1 << 32
"""What a rank that gives up adds to the number of ranks that have come, which is smaller."""


class Rendezvous:
    """Broadcasts through the store that wait for all of their ranks.

    Each attempt at one has a number. A rank that refused what the others waited for, and gave up, was not
    there: it takes part in their next attempt.

    Attributes:
        check_missing: raises if the group has ended meanwhile, or has to because one of the ranks given is
            gone.

    Args:
        store: the group's store.
        rank: this rank.
        where: rank and group, to stand in front of a message.
        check_missing: the attribute; called every second of waiting with the other ranks.
    """

    def __init__(
        self, store: Any, rank: int, where: str, check_missing: Callable[[Sequence[int]], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._where = where
        self.check_missing = check_missing
        self._attempts: dict[str, int] = {}
        self._refused = False

    def note_refusal(self) -> None:
        """Takes note that this rank has refused an operation, for which others may have waited."""
        self._refused = True

    def broadcast(
        self, key: str, ranks: Sequence[int], what: str, limit: timedelta, make: Callable[[], bytes]
    ) -> bytes:
        """Returns the first rank's value, as soon as all ranks have called; blocks.

        Args:
            key: name of the broadcast, which may be called again and again.
            ranks: the ranks that call, in the same order on each.
            what: the purpose, in words.
            limit: time limit.
            make: makes the value; called on the first rank.

        Raises:
            CollectiveTimeoutError: ranks did not come in time; names them. Or this one came too late, and
                another has given up. A further broadcast may succeed.
            DistBackendError: the first rank could not make the value.
            DistStoreError: somebody else wrote it, as far as the job's secret tells.
        """
        made = None
        try:
            while made is None:
                number = self._attempts.get(key, 0)
                self._attempts[key] = number + 1
                made = self._attempt(f"{key}/{number}", ranks, what, limit, make)
        finally:
            self._refused = False
        return made

    def _attempt(
        self, key: str, ranks: Sequence[int], what: str, limit: timedelta, make: Callable[[], bytes]
    ) -> bytes | None:
        """Returns the value; ``None`` where others had given up while this rank refused to come."""
        if self._rank == ranks[0]:
            self._publish(key, what, make)
        self._store.set(f"{key}/arrived/{self._rank}", b"1")
        count = self._store.add(f"{key}/count", 1)
        if count == len(ranks):
            self._end(key, [])
        else:
            if count < _GAVE_UP:
                self._wait(key, ranks, what, limit)
            elif self._refused:
                return None
            if missing := fetch(self._store, f"{key}/end", _missing):
                raise CollectiveTimeoutError(
                    f"{self._where} {what}: {ranks_in_words(missing)} did not come within another rank's "
                    "time limit; let all ranks call the operation again, or raise the limit for ranks that "
                    "come late",
                    missing[0],
                    missing_ranks=missing,
                )
        made, why = fetch(self._store, f"{key}/value", _made)
        if why:
            raise DistBackendError(
                f"{self._where} {what}: rank {ranks[0]} could not begin it: {why}", ranks[0]
            )
        return made

    def _publish(self, key: str, what: str, make: Callable[[], bytes]) -> None:
        def tell(made: bytes, why: str) -> None:
            publish(self._store, f"{key}/value", [made.hex(), why])

        try:
            tell(make(), "")
        except Exception as error:
            tell(b"", str(error) or type(error).__name__)
            self._end(key, [])
            raise DistBackendError(f"{self._where} {what}: {error}") from error

    def _end(self, key: str, missing: list[int]) -> None:
        """Tells those that wait that all ranks have come, or for which one of them has given up to wait."""
        publish(self._store, f"{key}/end", missing)

    def _wait(self, key: str, ranks: Sequence[int], what: str, limit: timedelta) -> None:
        deadline = time.monotonic() + limit.total_seconds()
        others = [rank for rank in ranks if rank != self._rank]
        while (left := deadline - time.monotonic()) > 0:
            pause = timedelta(seconds=min(left, _CHECK_SECONDS))
            if wait_for_keys(self._store, [f"{key}/end"], pause):
                return
            self.check_missing(others)
        missing = [rank for rank in others if not self._store.check([f"{key}/arrived/{rank}"])] or others
        if self._store.add(f"{key}/count", _GAVE_UP) == _GAVE_UP + len(ranks):
            return  # the last came at this moment
        self._end(key, missing)
        raise CollectiveTimeoutError(
            f"{self._where} {what}: {ranks_in_words(missing)} did not come within "
            f"{limit.total_seconds():g} s; NCCL makes connections in the first operation, in which all of "
            "them must take part",
            missing[0],
            missing_ranks=missing,
        )


def _missing(record: Any) -> list[int]:
    """Checks which ranks had not come when one gave up."""
    demand(isinstance(record, list) and all(type(rank) is int for rank in record), f"{record!r}")
    return list(record)


def _made(record: Any) -> tuple[bytes, str]:
    """Checks what the first rank has made, and why it could not."""
    demand(isinstance(record, list) and len(record) == 2, f"{record!r}")
    return as_bytes(record[0]), as_text(record[1])
