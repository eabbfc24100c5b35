"""Ranks agree in a store: each tells its record, and all get one answer, or the same error."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from collectives.errors import (
    CollectiveMismatchError,
    DistError,
    DistNetworkError,
    DistStoreError,
    PeerLostError,
    ranks_in_words,
)
from collectives.store.base import Store
from collectives.store.records import (
    as_text,
    demand,
    error_of,
    fetch,
    fetch_all,
    publish,
    read,
    record_of,
    written,
)
from collectives.store.waiting import compare_set, delete_keys, missing_text, peek, root_of, wait_for_keys
from collectives.time_limits import left_until

_LOOK_AGAIN = timedelta(milliseconds=200)
"""How often those who wait ask whether one of the others has died."""

_AT_A_TIME = 4
"""How many other ranks' records one who waits asks for when it looks, so that the store has little to do."""

_LOSS_LIMIT_S = 0.5
"""How long after the store has failed a rank may be found dead."""

_READERS_LIMIT_S, _READERS_PAUSE_S = 2.0, 0.005
"""How long a rank that fails, and may serve the store, stays for the others to read why."""

LostRanks = Callable[[], Collection[int]]
"""Returns which ranks are known to have died; asked again and again."""

Watch = Callable[[Mapping[int, Any]], DistError | None]
"""Returns the error for one of other ranks' records whose rank has died, if any; asked again and again."""

Why = Callable[[Sequence[int], bool], DistError]
"""Returns the error for ranks that have died (``True``), or not come within the limit (``False``)."""


def exchange(
    store: Any,
    key: str,
    rank: int,
    ranks: Sequence[int],
    limit: timedelta,
    where: str,
    *,
    record: Any = None,
    check: Callable[[Any], Any] = lambda record: record,
    combine: Callable[[list[Any]], Any] = lambda records: None,  # noqa: ARG005
    read: Callable[[Any], Any] = lambda answer: answer,
    why: Why | None = None,
    late: type[DistError] = DistStoreError,
    lost_ranks: LostRanks = tuple,
    look: Callable[[], object] = lambda: None,
    watch: Watch | None = None,
) -> Any:
    """Waits until all ranks have called this; returns what is made of their records, or raises one error.

    A rank that sees the last rank arrive, a rank die or its own limit pass writes the outcome; the first one
    written is final, also for ranks that come later. All wait for that one key, so that what each asks does
    not grow with their number. The last rank looks for the records of all, since anybody may count on. Each
    deletes its own record, and the last one to leave with an answer the rest; an error stays for those who
    come late.

    Args:
        store: the ranks' store.
        key: prefix of the keys, new for each exchange.
        rank: this rank.
        ranks: all that meet.
        limit: time limit of this rank.
        where: stands in front of a message.
        record: what this rank tells.
        check: of each record.
        combine: makes the answer for all of the records, in the order of ``ranks``, or raises the error for
            all; called by the rank that comes last.
        read: checks the answer.
        why: what a loss and a limit mean, where there is more to say than that ranks died or did not come.
        late: the error where they did not come, if ``why`` is not given.
        lost_ranks: where deaths show.
        look: called again and again while others are missing; may return an error that ends it for all.
        watch: like ``look``, with the records of others that have come so far, a few more each time.

    Raises:
        DistNetworkError: the store failed, and no rank is seen to have died with it.
        DistStoreError: somebody else writes to the store.
        DistError: as ``combine``, ``why``, ``look`` and ``watch`` say.
    """
    outcome, why = f"{key}/outcome", why or _blame(limit, late)
    end = time.monotonic() + limit.total_seconds()
    settle = partial(_settle, store, key, ranks, check, combine)
    unread = deque(sorted({*ranks} - {rank}, key=lambda one: (one < rank, one)))  # each begins elsewhere
    others: dict[int, Any] = {}

    with blaming_lost(ranks, lost_ranks, why, where):
        try:
            publish(store, f"{key}/{rank}", record)
            if int(store.add(f"{key}/arrived", 1)) >= len(ranks):
                settle()
            while not wait_for_keys(store, [outcome], min(_LOOK_AGAIN, left_until(end))):
                gone = None
                if watch:
                    others |= _records_of_some(store, key, unread, check)
                    gone = watch(others)
                if lost := _lost_among(ranks, lost_ranks):
                    give_up(store, key, why(lost, True))
                elif isinstance(error := look() or gone, DistError):  # whoever fails says why before it goes
                    give_up(store, key, error)
                elif time.monotonic() >= end and (absent := settle()):
                    give_up(store, key, why(absent, False))
            found = fetch(store, outcome, partial(_outcome, read=read))
        except DistStoreError as error:
            with contextlib.suppress(Exception):
                give_up(store, key, error)
            raise
        delete_keys(store, [f"{key}/{rank}"])
        if not isinstance(found, DistError):
            with contextlib.suppress(Exception):  # who serves the store has its answer, too, and may end
                if int(store.add(f"{key}/left", 1)) == len(ranks):
                    delete_keys(store, [outcome, f"{key}/arrived", f"{key}/left"])
    if isinstance(found, DistError):
        _await_readers(store, key, len(ranks), found, arrived=f"{key}/arrived")
        raise at(where, found)
    return found


def await_leavers(store: Any, key: str) -> None:
    """Waits a moment until all ranks have the answer of an exchange; for the one whose end ends the store."""
    end = time.monotonic() + _READERS_LIMIT_S
    with contextlib.suppress(Exception):
        while store.check([f"{key}/outcome"]) and time.monotonic() < end:
            time.sleep(_READERS_PAUSE_S)


def _settle(
    store: Any,
    key: str,
    ranks: Sequence[int],
    check: Callable[[Any], Any],
    combine: Callable[[list[Any]], Any],
) -> list[int]:
    """Writes the answer if all have come and nobody has written it; returns who has not come."""
    records = [f"{key}/{one}" for one in ranks]
    all_here = store.check(records)
    if store.check([f"{key}/outcome"]):  # asked last: whoever has read it has deleted its record
        return []
    if not all_here:
        return [one for one, told in zip(ranks, records, strict=True) if not store.check([told])]
    try:
        _decide(store, key, {"answer": combine(fetch_all(store, records, check))})
    except DistError as error:
        give_up(store, key, error)
    return []


def _records_of_some(store: Any, key: str, unread: deque[int], check: Callable[[Any], Any]) -> dict[int, Any]:
    """Returns what the next few ranks have told; never waits: whoever leaves deletes its record."""
    found = {}
    for one in [unread.popleft() for _ in range(min(len(unread), _AT_A_TIME))]:
        record = f"{key}/{one}"
        value = peek(store, record)
        if value is None:
            unread.append(one)
        else:
            found[one] = read(store, record, value, check)
    return found


def give_up(store: Any, key: str, error: DistError) -> None:
    """Lets an exchange fail for all ranks, with this error, unless it has its outcome already.

    Args:
        store: the ranks' store.
        key: of the exchange.
        error: the error.
    """
    _decide(store, key, {"error": record_of(error)})


def first_word(store: Any, key: str, mine: Any, read: Callable[[Any], Any]) -> Any:
    """Says what ranks come to, unless another one has; returns what the first one said, to all the same.

    Args:
        store: the ranks' store.
        key: new for each time.
        mine: an answer, or an error.
        read: checks the answer.
    """
    _decide(store, key, {"error": record_of(mine)} if isinstance(mine, DistError) else {"answer": mine})
    return fetch(store, f"{key}/outcome", partial(_outcome, read=read))


def word_of(store: Any, key: str, read: Callable[[Any], Any]) -> Any:
    """Returns what :func:`first_word` does, or ``None`` where nobody has said anything."""
    if not store.check([f"{key}/outcome"]):
        return None
    return fetch(store, f"{key}/outcome", partial(_outcome, read=read))


def forget(store: Any, keys: Iterable[str]) -> None:
    """Deletes what :func:`first_word` has left under some keys."""
    delete_keys(store, [f"{key}/outcome" for key in keys])


def fail(store: Any, key: str, size: int | None, error: DistError) -> DistError:
    """Lets what ranks do together fail for all, who look by :func:`told`; returns the first error.

    Args:
        store: the ranks' store.
        key: prefix of the keys, new for each time.
        size: number of ranks, each of which calls this when it has failed, or heard that another one has, and
            waits a moment for the others to read why; ``None`` not to wait.
        error: the error, unless another one has been told.
    """
    with contextlib.suppress(Exception):  # the store may have gone
        give_up(store, key, error)
        error = told(store, key) or error
    if size is not None:
        _await_readers(store, key, size, error)
    return error


def told(store: Any, key: str) -> DistError | None:
    """Returns the error with which a rank has called :func:`fail`, if one has and the store is there."""
    try:
        found: DistError | None = word_of(store, key, _no_answer)
    except _FAILURES as error:
        if not _store_failed(error):
            raise
        return None
    return found


def _no_answer(answer: Any) -> None:
    demand(False, f"the answer {answer!r}")


def _await_readers(store: Any, key: str, size: int, error: DistError, arrived: str = "") -> None:
    """Waits a moment until all who can have read why they fail: the store may go with this rank."""
    gone = {*error.missing_ranks, *([error.rank] if isinstance(error, PeerLostError) else [])}
    end = time.monotonic() + _READERS_LIMIT_S
    root = root_of(store)
    may_go = getattr(root, "is_master", not isinstance(root, Store))
    with contextlib.suppress(Exception):  # it may have gone with another rank
        readers, expected = int(store.add(f"{key}/left", 1)), size - len(gone)
        if may_go and arrived:
            expected = min(expected, int(store.add(arrived, 0)))
        while may_go and readers < expected and time.monotonic() < end:
            time.sleep(_READERS_PAUSE_S)
            readers = int(store.add(f"{key}/left", 0))


def _decide(store: Any, key: str, outcome: dict[str, Any]) -> None:
    """Publishes what ranks come to, unless one has done so: all go by the first word."""
    key = f"{key}/outcome"
    value = written(store, key, outcome)
    if compare_set(store, key, "", value) is None and not store.check([key]):
        store.set(key, value)


def _outcome(record: Any, read: Callable[[Any], Any]) -> Any:
    """Checks an outcome; returns the answer, or the error."""
    demand(isinstance(record, dict) and [*record] in (["answer"], ["error"]), f"the outcome {record!r}")
    return error_of(record["error"]) if "error" in record else read(record["answer"])


def at(where: str, error: DistError) -> DistError:
    """Returns an error that all ranks get, as one of this rank, unless it is one rank's."""
    text = str(error)
    return type(error)(text if text.startswith("[rank") else f"{where} {text}", **error.details())


def _lost_among(ranks: Sequence[int], lost_ranks: LostRanks) -> list[int]:
    return sorted({*lost_ranks()}.intersection(ranks))


_FAILURES = (RuntimeError, ConnectionError)
"""Classes of the errors of stores, which do not agree on one for a broken connection."""


def _store_failed(error: BaseException) -> bool:
    """Returns whether a store has gone; other errors of ours say what they mean."""
    if isinstance(error, NotImplementedError):  # a user's store may lack a method
        return False
    return isinstance(error, DistNetworkError) or not isinstance(error, DistError)


@contextlib.contextmanager
def blaming_lost(ranks: Sequence[int], lost_ranks: LostRanks, why: Why, where: str) -> Iterator[None]:
    """Names the rank with which the store has gone, whose end shows a little later.

    Args:
        ranks: that may have died.
        lost_ranks: where deaths show.
        why: what a loss means.
        where: stands in front of a message.

    Raises:
        DistNetworkError: in place of any error of a store, where no rank is seen to have died with it.
    """
    try:
        yield
    except _FAILURES as error:
        if not _store_failed(error):
            raise
        end = time.monotonic() + _LOSS_LIMIT_S
        while ranks and time.monotonic() < end:
            if lost := _lost_among(ranks, lost_ranks):
                raise at(where, why(lost, True)) from error
            time.sleep(_LOSS_LIMIT_S / 20)
        text = f"{where} the store failed; whoever kept it may have died: {error}"
        raise DistNetworkError(text) from error


def _blame(limit: timedelta, late: type[DistError] = DistStoreError) -> Why:
    def why(ranks: Sequence[int], died: bool) -> DistError:
        if died:
            return PeerLostError(f"{ranks_in_words(ranks)} died", ranks[0])
        return late(missing_text(ranks, limit), ranks[0], missing_ranks=ranks)

    return why


def join_group(
    store: Any,
    key: str,
    rank: int,
    members: Sequence[int],
    request: str,
    timeout: timedelta,
    lost_ranks: LostRanks = tuple,
    callers: Sequence[int] = (),
) -> None:
    """Checks that all ranks ask for the same group; members wait until all members are here.

    The first rank publishes its request. A rank with a different one publishes the conflict and raises, so
    that the members that wait for it raise as well: either all members join, or all raise.

    Args:
        store: the world's store.
        key: prefix of the group's keys, equal on all ranks: they make groups in the same order.
        rank: this rank in the default group.
        members: ranks of the group's members in the default group.
        request: what this rank asks for; must be equal on all ranks that take part.
        timeout: time limit.
        lost_ranks: where deaths show.
        callers: all ranks that call this, members or not, the last of which deletes the keys.

    Raises:
        CollectiveMismatchError: another rank asks for a different group.
        DistStoreError: a member did not come in time; names all that are missing.
        PeerLostError: a member has died.
    """
    where = f"[rank {rank}] new_group:"
    part = f"{key}/{members[0]}" if members else ""  # of several groups that one call makes, one for each

    def why(ranks: Sequence[int], died: bool) -> DistError:
        if not died:
            return _blame(timeout)(ranks, died)
        return PeerLostError(
            f"rank {ranks[0]}, a member of the group, has died; make the group of the ranks that are left, "
            "or start all of them again",
            ranks[0],
        )

    def mismatch(differs: str) -> DistError:
        return CollectiveMismatchError(f"{differs}; all ranks must create the same groups in the same order")

    def look() -> DistError | None:
        there = store.check([f"{key}/conflict"])  # of a rank that takes itself for no member
        return mismatch(fetch(store, f"{key}/conflict", as_text)) if there else None

    with blaming_lost(members, lost_ranks, why, where):
        differs = conflict(store, f"{key}/first", rank, request)
        if differs:
            publish(store, f"{key}/conflict", differs)
            if members:
                give_up(store, part, mismatch(differs))
            raise at(where, mismatch(differs))
    if rank in members:
        exchange(store, part, rank, members, timeout, where, why=why, lost_ranks=lost_ranks, look=look)
        if lost := _lost_among(members, lost_ranks):  # since it came
            raise at(where, why(lost, True))
    if callers and int(store.add(f"{key}/done", 1)) == len(callers):
        delete_keys(store, [f"{key}/first", f"{key}/done"])


def _request(record: Any) -> tuple[int, str]:
    """Checks a rank and what it asks for."""
    demand(isinstance(record, list) and [type(part) for part in record] == [int, str], f"{record!r}")
    return record[0], record[1]


def conflict(store: Any, key: str, rank: int, request: str) -> str:
    """Returns how this rank's request differs from that of the first rank, if it does.

    Args:
        store: the ranks' store.
        key: where the first one leaves its request.
        rank: this rank.
        request: what it asks for, in words.
    """
    mine = written(store, key, [rank, request])
    first = compare_set(store, key, "", mine)
    if first is None:  # ranks that ask for different groups run into the time limit instead
        return ""
    other, asked = read(store, key, first, _request)
    if asked == request:
        return ""
    return f"rank {other} asks for {asked}, but rank {rank} for {request}"
