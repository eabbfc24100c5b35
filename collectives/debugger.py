"""The debugger that :func:`collectives.breakpoint` opens."""

from __future__ import annotations

import bdb
import pdb  # noqa: T100 - the class, not a breakpoint left behind
import sys
from pathlib import Path
from types import FrameType

__all__ = ["Debugger"]


class Debugger(pdb.Pdb):
    """A debugger that reads the terminal, of which ``multiprocessing`` deprives its children."""

    def stop_at(self, frame: FrameType) -> None:
        """Talks to the user in ``frame``, and returns when the user lets the program go on.

        Raises:
            bdb.BdbQuit: the user quits.
        """
        self.reset()
        before = sys.stdin
        with Path("/dev/stdin").open() as terminal:
            sys.stdin = terminal
            try:
                self.interaction(frame, None)
            finally:
                sys.stdin = before
        if self.quitting:
            raise bdb.BdbQuit

    def follow(self, frame: FrameType) -> None:
        """Goes on stepping from ``frame`` where the user asked for that; the caller must return at once."""
        if self.stoplineno == -1 and not self.breaks:
            return
        if self.stoplineno != -1:
            self.set_next(frame)
        below: FrameType | None = frame
        while below is not None:
            below.f_trace = self.trace_dispatch
            self.botframe = below
            below = below.f_back
        sys.settrace(self.trace_dispatch)
