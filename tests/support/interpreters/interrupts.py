"""Interrupts for the processes that tests start."""

from __future__ import annotations

import signal

__all__ = ["let_children_be_interrupted"]


def let_children_be_interrupted() -> None:
    """Lets what this process starts from now on be interrupted, though it may not be itself.

    A shell starts background jobs with SIGINT ignored, and all below them inherit that, so that Python there
    installs no handler. What is handled here, if only by doing nothing, is back to its default in a new
    program.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)
