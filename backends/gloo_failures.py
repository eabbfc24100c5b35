"""What the messages of Gloo's errors mean."""

from __future__ import annotations

import re

from collectives.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError

__all__ = ["ABORTED", "DISCONNECTED", "OWN_END", "PASSED_LIMIT", "TIMED_OUT", "broken_by"]

TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
"""Matches messages about a limit that passed."""

DISCONNECTED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|(read|write) error", re.IGNORECASE
)
"""Matches messages about a connection that broke."""

OWN_END = "Application timeout caused pair closure"
"""Part of the message where this rank closed the connections, because a limit passed."""

ABORTED = "it aborted the group"
"""The farewell of a rank that aborts."""

PASSED_LIMIT = "passed the time limit"
"""The end of the farewell of a rank whose operation passed its limit."""


def broken_by(what: str, rank: int, how: str, text: str) -> Exception:
    """Returns what to raise in ``what`` for a connection that another rank closed.

    Args:
        what: the operation, with rank and group in front.
        rank: the rank; -1 where it is not known.
        how: how it left.
        text: Gloo's message.
    """
    if how == ABORTED:
        return GroupAbortedError(f"{what} did not finish, because rank {rank} aborted the group")
    if how.endswith(PASSED_LIMIT):
        return CollectiveTimeoutError(f"{what} did not finish, because rank {rank} gave up: {how}")
    who = f"rank {rank} is lost: {how}" if rank >= 0 else "a rank is lost; Gloo does not tell which"
    return PeerLostError(f"{what} {who} ({_first_line(text)})", rank)


def _first_line(text: str) -> str:
    """Returns Gloo's message without the source location in front and the advice after it."""
    return re.sub(r"^\[[^\]]*\]\s*", "", text).split(". ")[0].strip()
