"""A barrier on the host that names the ranks which did not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from collectives.core.membership import Membership
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistError, DistStoreError
from collectives.store.error_records import error_of, record_of
from collectives.store.records import read, written
from collectives.store.waiting import delete_keys

__all__ = ["monitored_barrier"]

_OUTCOME_GRACE = timedelta(seconds=10)
"""How much longer than rank 0 the others wait, so that they report its outcome and not their own timeout."""

_POLL_SECONDS = 0.005


def monitored_barrier(group: Membership, timeout: timedelta | None, wait_all_ranks: bool) -> None:
    """Blocks until all ranks of ``group`` are here; see :meth:`collectives.ProcessGroup.monitored_barrier`.

    Arrivals and the outcome, which rank 0 writes, are keys of the group's store, so that a rank stuck in a
    collective is found on every backend, and the group is not broken by the time limit.
    """
    store = group.get_group_store()
    if store is None:
        raise DistBackendError(
            f"[rank {group.rank()}] monitored_barrier on {group.describe()} needs the group's store, "
            "but it was made without one"
        )
    limit = group.timeout if timeout is None else timeout
    turn = group.next_monitored_barrier()
    about: dict[str, Any] = {"operation": "monitored_barrier", "sequence": turn}
    outcome = f"monitored_barrier/{turn}/outcome"
    if group.rank() != 0:
        store.set(f"monitored_barrier/{turn}/{group.rank()}", "here")
        try:
            store.wait([outcome], limit + _OUTCOME_GRACE)
        except (DistStoreError, RuntimeError) as error:
            raise CollectiveTimeoutError(
                f"[rank {group.rank()}] monitored_barrier on {group.describe()}: rank 0 did not come within "
                f"{limit.total_seconds():g} s; look at what rank 0 does, or raise the timeout",
                0,
                missing_ranks=[0],
                **about,
            ) from error
        found = read(store.get(outcome), outcome, _outcome)
        if found is not None:
            raise CollectiveTimeoutError(f"[rank {group.rank()}] {found}", **found.details())
        return
    missing = _missing_ranks(group, store, turn, time.monotonic() + limit.total_seconds(), wait_all_ranks)
    delete_keys(store, [f"monitored_barrier/{turn}/{r}" for r in range(1, group.size()) if r not in missing])
    if not missing:
        if turn:  # all ranks have come, so that none reads the outcome of the one before
            delete_keys(store, [f"monitored_barrier/{turn - 1}/outcome"])
        store.set(outcome, written(None, outcome))
        return
    names = ", ".join(map(str, missing))
    plural = "s" if len(missing) > 1 else ""
    # in parentheses the words of torch's own barrier, which people search logs for
    theirs = f"Rank{plural} {names} failed to pass monitoredBarrier"
    if not limit:
        theirs = "Rank 0 timed out in monitoredBarrier"
    message = (
        f"monitored_barrier on {group.describe()}: rank{plural} {names} "
        f"did not come within {limit.total_seconds():g} s ({theirs})"
        + ("" if wait_all_ranks else "; pass wait_all_ranks=True to list every missing rank")
    )
    found = CollectiveTimeoutError(message, missing[0], missing_ranks=missing, **about)
    store.set(outcome, written(record_of(found), outcome))
    raise CollectiveTimeoutError(f"[rank 0] {message}", **found.details())


def _outcome(record: Any) -> DistError | None:
    """Checks what rank 0 published: ``None``, or why it raises."""
    return None if record is None else error_of(record)


def _missing_ranks(
    group: Membership, store: object, turn: int, deadline: float, wait_all_ranks: bool
) -> list[int]:
    """Waits on rank 0; returns the ranks missing at the deadline, only the first unless all are asked for."""
    waiting = list(range(1, group.size()))
    while waiting:
        waiting = [r for r in waiting if not store.check([f"monitored_barrier/{turn}/{r}"])]  # type: ignore[attr-defined]
        if waiting and time.monotonic() >= deadline:
            return waiting if wait_all_ranks else waiting[:1]
        if waiting:
            time.sleep(_POLL_SECONDS)
    return []
