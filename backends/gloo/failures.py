"""What the messages of Gloo's errors mean."""

from __future__ import annotations

import re

from collectives.backends._shared.exit_reasons import blamed

__all__ = ["DISCONNECTED", "OWN_END", "TIMED_OUT", "broken_by"]

TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
"""Matches messages about a limit that passed."""

DISCONNECTED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|(read|write) error", re.IGNORECASE
)
"""Matches messages about a connection that broke."""

OWN_END = "Application timeout caused pair closure"
"""Part of the message where this rank closed the connections, because a limit passed."""


def broken_by(what: str, rank: int, how: str, text: str) -> Exception:
    """Returns what to raise in ``what`` for a connection that another rank closed.

    Args:
        what: the operation, with rank and group in front.
        rank: the rank; -1 where it is not known.
        how: how it left.
        text: Gloo's message.
    """
    untold = "" if rank >= 0 else "; Gloo does not tell which"
    return blamed(what, rank, how, f"{untold} ({_first_line(text)})")


def _first_line(text: str) -> str:
    """Returns Gloo's message without the source location in front and the advice after it."""
    return re.sub(r"^\[[^\]]*\]\s*", "", text).split(". ")[0].strip()
