"""A barrier on the host that names the ranks which did not come."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from collectives.core.arguments.validation import check_limit
from collectives.core.membership import Membership
from collectives.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    PeerLostError,
    ranks_in_words,
)
from collectives.store.joining.meeting import meet

__all__ = ["monitored_barrier"]


def monitored_barrier(group: Membership, timeout: timedelta | None, wait_all_ranks: bool) -> None:
    """Blocks until all ranks of ``group`` are here; see :meth:`collectives.ProcessGroup.monitored_barrier`.

    Ranks meet in the group's store, so that a rank stuck in a collective is found on every backend, and the
    group is not broken by the time limit.
    """
    what = f"monitored_barrier on {group.describe()}"
    where = f"[rank {group.rank()}] {what}"
    store = group.get_group_store()
    if store is None:
        raise DistBackendError(f"{where} needs the group's store, but it was made without one")
    given = check_limit(group, "monitored_barrier", timeout, positive=False)
    limit = group.timeout if given is None else given
    turn = group.next_monitored_barrier()
    about: dict[str, Any] = {"operation": "monitored_barrier", "sequence": turn}

    def why(ranks: Sequence[int], lost: bool) -> DistError:
        named = ranks if wait_all_ranks else ranks[:1]
        names = ranks_in_words(named)
        # in parentheses the words of torch's own barrier, which people search logs for
        theirs = f"{names.capitalize()} failed to pass monitoredBarrier"
        if lost:
            return PeerLostError(f"{what}: {names} died or ended ({theirs})", named[0], **about)
        if not limit:
            theirs = f"Rank {group.rank()} timed out in monitoredBarrier"
        text = f"{what}: {names} did not come within {limit.total_seconds():g} s ({theirs})"
        if not wait_all_ranks:
            text += "; pass wait_all_ranks=True to list every missing rank"
        return CollectiveTimeoutError(text, named[0], missing_ranks=named, **about)

    key = f"monitored_barrier/{turn}"
    try:
        found = meet(store, key, group.rank(), range(group.size()), limit, group.lost_ranks, why)
    except DistNetworkError as error:
        raise DistNetworkError(f"{where}: {error}", **about) from error
    if found is not None:
        raise type(found)(f"[rank {group.rank()}] {found}", **found.details())
