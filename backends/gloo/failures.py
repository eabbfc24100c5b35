"""What the messages of Gloo's errors mean."""

from __future__ import annotations

import re
from typing import Any

from collectives.backends._shared.exit_reasons import Departure, blamed
from collectives.backends._shared.operation import Operation
from collectives.errors import CollectiveTimeoutError, DistError

__all__ = ["DISCONNECTED", "OWN_END", "TIMED_OUT", "broken_by", "limit_passed"]

TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
"""Matches messages about a limit that passed."""

DISCONNECTED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|(read|write) error", re.IGNORECASE
)
"""Matches messages about a connection that broke."""

OWN_END = "Application timeout caused pair closure"
"""Part of the message where this rank closed the connections, because a limit passed."""


def limit_passed(what: str, operation: Operation) -> CollectiveTimeoutError:
    """Returns the error of an operation that passed its time limit.

    Args:
        what: the operation, with rank and group in front.
        operation: the same, for its limit and the error's attributes.
    """
    return CollectiveTimeoutError(
        f"{what} passed its time limit of {operation.timeout.total_seconds():g} s. Gloo does not tell which "
        "rank is missing; monitored_barrier() in front of it names the rank",
        **operation.about,
    )


def broken_by(what: str, found: Departure | None, about: dict[str, Any], text: str) -> DistError:
    """Returns what to raise in ``what`` for a connection that another rank closed.

    Args:
        what: the operation, with rank and group in front.
        found: which one, and why; ``None`` where it is not known.
        about: attributes of the error that tell the operation.
        text: Gloo's message.
    """
    untold = "; Gloo does not tell which" if found is None else ""
    return blamed(what, found, about, f"{untold} ({_first_line(text)})")


def _first_line(text: str) -> str:
    """Returns Gloo's message without the source location in front and the advice after it."""
    return re.sub(r"^\[[^\]]*\]\s*", "", text).split(". ")[0].strip()
