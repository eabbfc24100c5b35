"""The debugger that :func:`collectives.breakpoint` opens."""

from __future__ import annotations

import bdb
import ctypes
import functools
import pdb  # noqa: T100 - the class, not a breakpoint left behind
import sys
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

__all__ = ["Debugger"]


@functools.cache
def _terminal() -> TextIO:
    """Opens the terminal once, so that what one stop has read ahead is there for the next."""
    return Path("/dev/stdin").open()


class Debugger(pdb.Pdb):
    """A debugger that reads the terminal, of which ``multiprocessing`` deprives its children."""

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Talks to the user; also where stepping stops."""
        before = sys.stdin
        sys.stdin = _terminal()
        try:
            super().interaction(*args, **kwargs)
        finally:
            sys.stdin = before

    def stop_at(self, frame: FrameType) -> None:
        """Talks to the user in ``frame``, and returns when the user lets the program go on.

        Raises:
            bdb.BdbQuit: the user quits.
        """
        self.reset()
        self.interaction(frame, None)
        if sys.version_info < (3, 13):
            # Keeps what the user assigned to local variables; newer frames do that by themselves.
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
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
