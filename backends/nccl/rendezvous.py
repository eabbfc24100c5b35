"""Brings ranks together in the store before a call of NCCL that would wait for a missing one for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from collectives.errors import CollectiveTimeoutError, DistBackendError, DistError, ranks_in_words
from collectives.store.joining.agreement import exchange, give_up
from collectives.store.records import as_bytes, as_text

__all__ = ["Rendezvous"]


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
        check_missing: the attribute; called again and again with the other ranks while some are missing.
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
        where = f"{self._where} {what}:"
        others = [rank for rank in ranks if rank != self._rank]
        value, own = "", False
        if self._rank == ranks[0]:
            try:
                value = make().hex()
            except Exception as error:
                why = str(error) or type(error).__name__
                failed = DistBackendError(f"rank {self._rank} could not begin it: {why}", self._rank)
                give_up(self._store, key, failed)
                raise DistBackendError(f"{where} {error}") from error

        def late(missing: Sequence[int], died: bool) -> DistError:  # noqa: ARG001 - check_missing sees deaths
            nonlocal own
            own = True
            return CollectiveTimeoutError(
                f"{ranks_in_words(missing)} did not come within {limit.total_seconds():g} s; NCCL makes "
                "connections in the first operation, in which all of them must take part",
                missing[0],
                missing_ranks=missing,
            )

        def look() -> None:
            nonlocal own
            own = True  # what it raises
            self.check_missing(others)
            own = False

        try:
            made: bytes = exchange(
                self._store,
                key,
                self._rank,
                ranks,
                limit,
                where,
                record=value,
                check=as_text,
                combine=lambda values: values[0],
                read=as_bytes,
                why=late,
                look=look,
            )
        except CollectiveTimeoutError as error:
            missing = error.missing_ranks
            if own or not missing:
                raise
            if self._refused and self._rank in missing:
                return None
            raise CollectiveTimeoutError(
                f"{where} {ranks_in_words(missing)} did not come within another rank's time limit; let all "
                "ranks call the operation again, or raise the limit for ranks that come late",
                missing[0],
                missing_ranks=missing,
            ) from error
        return made
