"""Exit reasons: why a rank left a group, as it publishes in the store, and the errors that other ranks raise.

For backends whose library tells one rank nothing of another's end
(:mod:`collectives.backends._shared.process_records`). The texts are compared between ranks.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from collectives.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError, PeerLostError

__all__ = [
    "ABORTED",
    "FAILED",
    "PASSED_LIMIT",
    "SHUT_DOWN",
    "blamed",
    "exception_behind",
    "refuse_broken",
    "stopped_by",
]

ABORTED = "it aborted the group"
"""Beginning of the exit reason of a rank that aborts; what follows is :func:`exception_behind`."""

SHUT_DOWN = "it shut the group down"
"""Exit reason of a rank that ends the group in order."""

PASSED_LIMIT = "passed its time limit"
"""End of the exit reason of a rank whose operation passed its limit."""

FAILED = "failed"
"""In the exit reason of a rank whose call failed, between the operation and the library's message."""


_LONGEST = 400
"""Characters of an exception that other ranks are told."""


def exception_behind() -> str:
    """Returns the exception for which this rank aborts, as words to append; empty where there is none.

    It is the one that the calling thread handles, or the one that ended the program.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at a prompt, the last one ended a line only
        error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    return f", after {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}"


def blamed(what: str, rank: int, how: str, aside: str = "") -> Exception:
    """Returns what to raise for another rank that is gone or has given up.

    Args:
        what: the operation, with rank and group in front.
        rank: the rank; -1 where it is not known.
        how: how it left.
        aside: what else is known of a loss.
    """
    if how.startswith(ABORTED):
        after = how.removeprefix(ABORTED)
        return GroupAbortedError(f"{what} did not finish, because rank {rank} aborted the group{after}")
    if how.endswith(PASSED_LIMIT):
        return CollectiveTimeoutError(f"{what} did not finish, because rank {rank} gave up: {how}")
    if f" {FAILED}: " in how:
        return DistBackendError(f"{what} did not finish, because rank {rank} gave up: {how}")
    who = f"rank {rank} is lost: {how}" if rank >= 0 else "a rank is lost"
    return PeerLostError(f"{what} {who}{aside}", rank)


def stopped_by(what: str, cause: Exception) -> Exception:
    """Returns the error of an operation that the end of its group stopped; a lost rank is named by all.

    Args:
        what: the operation, with rank and group in front.
        cause: what broke the group.
    """
    text = f"{what} did not finish, because {cause}"
    if isinstance(cause, PeerLostError):
        return PeerLostError(text, cause.rank)
    return GroupAbortedError(text)


def refuse_broken(what: str, cause: Exception, ended: bool) -> NoReturn:
    """Raises, because something broke the group.

    Args:
        what: the operation that is about to begin, with rank and group in front.
        cause: what broke the group.
        ended: whether this rank has ended the group besides, so that no rank is to blame any more.
    """
    text = f"{what} the group is broken; first cause: {cause}"
    if isinstance(cause, PeerLostError) and not ended:
        raise PeerLostError(text, cause.rank) from cause
    raise GroupAbortedError(text) from cause
