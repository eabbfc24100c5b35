"""The first cause of a group's failure, shared with the other ranks through the store.

NCCL lets ranks wait for each other without limit, and reports an error of one rank to no other. So every rank
publishes in the group's store that it gave up and why, and which operation it waits in while that is slow.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from collectives.backends._shared.bounded_calls import BoundedCalls
from collectives.backends._shared.exit_reasons import (
    Departure,
    aborted_by,
    blamed,
    departure_of,
    limit_reason,
    refuse_broken,
    stopped_by,
)
from collectives.backends._shared.operation import Operation
from collectives.backends._shared.process_records import Liveness
from collectives.backends.nccl.in_flight import PendingOperation
from collectives.backends.nccl.libnccl import NcclError, NcclStatus
from collectives.core.work import without_frames
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistError, GroupAbortedError
from collectives.logs import Log
from collectives.store.prefix import PrefixStore
from collectives.store.records import as_text, fetch, publish

__all__ = ["Failures"]

_T = TypeVar("_T")

_SHUT_DOWN_SECONDS = 3.0
"""How long an operation may need a rank that has shut the group down: its last messages arrive."""

_TOLD_SECONDS = 3.0
"""After what time all ranks that wait in an operation have said so."""

_STORE_SECONDS = 1.0
"""How long the store may take for a question about the other ranks: time limits must not wait for it."""

_MESSAGES = frozenset({"send", "recv"})

_MEETING_MESSAGES = (
    "; messages of both directions that wait for each other belong in batch_isend_irecv, or need the option "
    "duplex_messages"
)

_BROKEN_LINKS = frozenset({NcclStatus.REMOTE_ERROR, NcclStatus.SYSTEM_ERROR, NcclStatus.TIMEOUT})
"""What NCCL says when another rank is gone."""


class Failures:
    """The first cause of a group's end, and the errors that come of it.

    Args:
        store: the group's store.
        rank: the attribute.
        size: the attribute.
        where: the attribute.
        ending: fails all pending operations and stops NCCL; entered once, with the cause, and left when the
            other ranks have been told, as NCCL may take its time.
        log: the attribute; the cause goes there at once, as nobody may ask for it.

    Attributes:
        rank: this rank.
        size: number of ranks.
        log: the group's.
        where: rank and group, to stand in front of a message.
        over: whether the group has ended, and :meth:`refuse` raises.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        where: str,
        ending: Callable[[DistError], AbstractContextManager[None]],
        log: Log,
    ) -> None:
        self._store = store
        self._liveness = Liveness(PrefixStore("liveness", store), rank, size)
        self.rank = rank
        self.size = size
        self.where = where
        self._asking = BoundedCalls("nccl store")
        self._ending = ending
        self.log = log
        self._lock = threading.RLock()
        self._cause: DistError | None = None
        self._left: str | None = None
        self.over = False
        self._shut_down_seen: float | None = None

    def refuse(self, what: object) -> None:
        """Raises if the group has ended.

        Args:
            what: the operation that is about to begin.
        """
        cause = self._cause
        if cause is not None:
            refuse_broken(f"{self.where} {what}:", cause, self._left is not None)
        if self._left is not None:
            raise GroupAbortedError(f"{self.where} {what}: {self._left}")

    @property
    def cause(self) -> DistError | None:
        """What broke the group."""
        return self._cause

    def leave(self, aborts: bool) -> bool:
        """Notes that this rank ends the group; returns whether it had not done so before."""
        with self._lock:
            if self._left is not None:
                return False
            self._left = "the group was aborted by this rank" if aborts else "the group was shut down"
            self.over = True
        if aborts:
            self._break(*aborted_by(self.where, self.rank))
        return True

    def publish_shutdown(self) -> None:
        """Tells the others that this rank has shut the group down in order."""
        self._liveness.publish_exit(None)

    def stopped_error(self, operation: Operation, cause: DistError) -> DistError:
        """Returns the error of an operation that the end of the group stopped."""
        return stopped_by(f"{self.where} {operation}:", cause)

    def call_failed(self, pending: PendingOperation, error: Exception) -> Exception:
        """Returns what to raise for a call of NCCL that failed; it breaks the group."""
        with self._lock:
            if pending.error is None and self._cause is not None:
                pending.fail(self.stopped_error(pending.operation, self._cause))
        if pending.error is None:
            self._fail(pending, f"{self.where} {pending.operation}:", error)
        return pending.error or error

    def communicator_failed(self, pending: PendingOperation | None, error: NcclError) -> None:
        """Breaks the group after a communicator has met an error."""
        what = f"{self.where} " + ("the communicator:" if pending is None else f"{pending.operation}:")
        self._fail(pending, what, error)

    def expire(self, pending: PendingOperation) -> None:
        """Fails an operation that passed its time limit, and breaks the group."""
        if pending.error is not None or self._cause is not None:
            return
        operation = pending.limited
        try:
            missing, elsewhere = self._ask(lambda: self._find_elsewhere(operation))
        except TimeoutError:
            missing = []
            elsewhere = "The store does not answer, so that nobody knows what the other ranks wait in"
        hint = _MEETING_MESSAGES if operation.name in _MESSAGES else ""
        expired = CollectiveTimeoutError(
            f"{self.where} {operation}: passed its time limit of {operation.timeout.total_seconds():g} s. "
            f"{elsewhere}{hint}",
            missing[0] if missing else -1,
            missing_ranks=missing,
            **operation.about,
        )
        self._break(expired, limit_reason(expired), pending)

    def publish_waiting(self, pending: PendingOperation | None) -> None:
        """Tells the others which operation of this rank is slow, or that none is any more."""
        key = f"waiting/{self.rank}"
        text = "" if pending is None else str(pending.operation)
        with contextlib.suppress(Exception):
            self._ask(lambda: publish(self._store, key, text))

    def check_missing(self, missing: Collection[int]) -> None:
        """Raises if the group has ended, or has to because ranks will not come to a communicator."""
        self.check_peers(None, missing)
        if self._cause is not None:
            raise without_frames(self._cause)

    def check_peers(self, pending: PendingOperation | None, needed: Collection[int] | None) -> None:
        """Breaks the group if another rank is gone or has given up.

        Args:
            pending: the operation that waits.
            needed: the ranks that it needs; ``None`` for all.
        """
        try:
            found = self._ask(self._liveness.poll_lost)
        except Exception:  # noqa: BLE001 - the store is gone or does not answer: the time limit remains
            return
        if found is None:
            return
        if found.reason is None:
            now = time.monotonic()
            if needed is not None and found.rank not in needed:
                return
            if self._shut_down_seen is None:
                self._shut_down_seen = now
            if now - self._shut_down_seen < _SHUT_DOWN_SECONDS:
                return
        what = f"{self.where} " + ("making a communicator:" if pending is None else f"{pending.operation}:")
        self._break(blamed(what, found, _about(pending)), None, pending, found)

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, as far as this one sees, or whose loss is known."""
        try:
            return self._ask(lambda: self._liveness.lost_ranks(self._cause))
        except TimeoutError:
            return []

    def break_for(self, cause: DistError) -> None:
        """Breaks the group for what broke another one of the same ranks."""
        if self._left is None:
            self._break(cause, None, lost=departure_of(cause, self.rank))

    def _ask(self, function: Callable[[], _T]) -> _T:
        """Returns what the store answers.

        Raises:
            TimeoutError: it does not.
        """
        return self._asking(function, _STORE_SECONDS)

    def _find_elsewhere(self, operation: Operation) -> tuple[list[int], str]:
        """Returns which ranks had not come, and what each waits in; as far as they published it."""
        lines, missing = [], []
        # All who wait in it have said so by then, and nobody leaves it before all have come.
        tells = operation.timeout.total_seconds() > _TOLD_SECONDS and operation.needs_all
        for rank in range(self.size):
            if rank == self.rank:
                continue
            text = ""
            with contextlib.suppress(Exception):
                if self._store.check([key := f"waiting/{rank}"]):
                    text = fetch(self._store, key, as_text)
            if tells and text.partition(" (")[0] != operation.short:
                missing.append(rank)
            lines.append(
                f"rank {rank} waits in {text}" if text else f"rank {rank} waits in no operation of this group"
            )
        return missing, "; ".join(lines) or "The group has no other rank: the device did not get to it"

    def _fail(self, pending: PendingOperation | None, what: str, error: Exception) -> None:
        found = None
        if isinstance(error, NcclError) and error.status in _BROKEN_LINKS:
            with contextlib.suppress(TimeoutError):
                found = self._ask(self._liveness.find_lost)
        about = _about(pending)
        if found is not None:
            self._break(blamed(what, found, about), None, pending, found)
            return
        name = "a call" if pending is None else f"its {pending.operation.short}"
        reason = DistBackendError(f"{name} failed: {error}", self.rank, **about)
        self._break(DistBackendError(f"{what} {error}", self.rank, **about), reason, pending)

    def _break(
        self,
        cause: DistError,
        exit_reason: DistError | None,
        pending: PendingOperation | None = None,
        lost: Departure | None = None,
    ) -> None:
        """Ends the group for a cause, unless it has one.

        Args:
            cause: the cause.
            exit_reason: what to tell the other ranks of this one.
            pending: the operation whose error the cause is.
            lost: the rank to blame, and why.
        """
        with self._lock:
            if self._cause is not None:
                return
            self._cause = without_frames(cause)  # which would hold the group
            self.over = True
            if pending is not None and pending.error is None:
                pending.fail(cause)
        if self._left is None:
            self.log.error("the group is broken: %s", str(cause).removeprefix(f"{self.where} "))
        with self._ending(cause):
            if lost is not None:
                self._liveness.publish_lost(lost)
            if exit_reason is not None:
                self._liveness.publish_exit(exit_reason)


def _about(pending: PendingOperation | None) -> dict[str, Any]:
    """Returns the attributes of an error that tell the operation."""
    return {} if pending is None else pending.operation.about
