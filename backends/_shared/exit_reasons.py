"""Exit reasons: why a rank left a group, as it publishes in the store, and the errors that other ranks raise.

For backends whose library tells one rank nothing of another's end
(:mod:`collectives.backends._shared.health`). A reason is an error, whose text says what the rank
did; ``None`` stands for a rank that shut the group down in order.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple, NoReturn

from collectives.errors import (
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    PeerLostError,
    ranks_in_words,
)


class Departure(NamedTuple):
    """A rank that is gone.

    Attributes:
        rank: the rank.
        reason: why, a :class:`PeerLostError` where it died; ``None`` where it shut the group down.
    """

    rank: int
    reason: DistError | None


_LONGEST = 400
"""Characters of an exception that other ranks are told."""


def exception_behind() -> str:
    """Returns class and text of the exception for which this rank aborts; empty where there is none.

    It is the one that the calling thread handles, or the one that ended the program.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at a prompt, the last one ended a line only
        error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def aborted_by(where: str, rank: int) -> tuple[GroupAbortedError, GroupAbortedError]:
    """Returns what breaks the group for this rank, which aborts, and its exit reason.

    Args:
        where: rank and group.
        rank: this rank.
    """
    reason = abort_reason("aborted the group", rank)
    broken = GroupAbortedError(f"{where} the group was aborted by this rank", rank, cause=reason.cause)
    return broken, reason


def abort_reason(does: str, rank: int) -> GroupAbortedError:
    """Returns the exit reason of this rank, which aborts, with the cause of that.

    Args:
        does: what it does, in words.
        rank: this rank.
    """
    ended = not threading.main_thread().is_alive()  # as after sys.exit, of which nothing else is left
    behind = exception_behind() or ("the end of its program" if ended else "")
    cause = DistError(behind, rank) if behind else None
    return GroupAbortedError(does + (behind and f", after {behind}"), rank, cause=cause)


def limit_reason(expired: CollectiveTimeoutError) -> CollectiveTimeoutError:
    """Returns the exit reason of this rank, of which an operation passed its time limit.

    Args:
        expired: the error of that operation here.

    Returns:
        The same, in words that make sense to other ranks, with the ranks that had not come.
    """
    without = f" without {ranks_in_words(expired.missing_ranks)}" if expired.missing_ranks else ""
    text = f"its {expired.operation} #{expired.sequence} passed its time limit{without}"
    return CollectiveTimeoutError(text, **expired.details())


def departure_of(cause: DistError, rank: int) -> Departure | None:
    """Returns what to tell the other ranks of what broke another group of the same ranks.

    Args:
        cause: that, as this rank knows it.
        rank: this rank.

    Returns:
        The rank at fault, or this one where it passes on a failure of which others tell; ``None`` where it is
        a lost rank that nobody knows.
    """
    if isinstance(cause, PeerLostError):
        return Departure(cause.rank, cause) if cause.rank >= 0 else None
    if isinstance(cause, GroupAbortedError) and cause.rank >= 0:
        reason = GroupAbortedError(f"broke the group: {cause}", **cause.details(), cause=cause.cause)
        return Departure(cause.rank, reason)
    return Departure(rank, cause)


def blamed(what: str, found: Departure | None, about: dict[str, Any], aside: str = "") -> DistError:
    """Returns what to raise for another rank that is gone or has given up.

    Args:
        what: the operation, with rank and group in front.
        found: which rank and why; ``None`` where that is not known.
        about: attributes of the error that tell the operation.
        aside: what else is known of a loss.
    """
    if found is None:
        return PeerLostError(f"{what} a rank is lost{aside}", **about)
    rank, reason = found
    if reason is None:
        return PeerLostError(f"{what} rank {rank} is lost: it shut the group down{aside}", rank, **about)
    if isinstance(reason, PeerLostError):
        return PeerLostError(f"{what} rank {rank} is lost: {reason}{aside}", rank, **about)
    does = str(reason) if isinstance(reason, GroupAbortedError) else f"gave up: {reason}"
    details = reason.details() if reason.operation else {**reason.details(), **about}
    text = f"{what} did not finish, because rank {rank} {does}"
    return type(reason)(text, **details, cause=reason.cause)


def stopped_by(what: str, first: DistError, *, elsewhere: bool = False) -> DistError:
    """Returns the error of an operation that the end of its group stopped; a lost rank is named by all.

    Args:
        what: the operation, with rank and group in front.
        first: what broke the group.
        elsewhere: whether another rank has given up; a time limit that passed there has the same class here.
    """
    same = PeerLostError, CollectiveTimeoutError if elsewhere else PeerLostError
    kind = type(first) if isinstance(first, same) else GroupAbortedError
    return _come_of(kind, f"{what} did not finish, because {first}", first)


def refuse_broken(what: str, first: DistError, ended: bool) -> NoReturn:
    """Raises, because something broke the group.

    Args:
        what: the operation that is about to begin, with rank and group in front.
        first: what broke the group.
        ended: whether this rank has ended the group besides, so that no rank is to blame any more.
    """
    lost = isinstance(first, PeerLostError) and not ended
    kind = PeerLostError if lost else GroupAbortedError
    raise _come_of(kind, f"{what} the group is broken; first cause: {first}", first) from first


def _come_of(kind: type[DistError], text: str, first: DistError) -> DistError:
    """Returns an error that says what the first one says; its cause is that, or the cause of one alike."""
    return kind(text, **first.details(), cause=first.cause if type(first) is kind else first)
