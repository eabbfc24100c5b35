"""Which calls are inside NCCL, so that a communicator does not vanish under one.

NCCL frees a communicator when it is aborted, whoever may be about to use it. So every call announces itself,
and the end of a communicator first refuses new calls, then gives those on their way a moment to return.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from collectives.backends.nccl.libnccl.codes import NcclError, NcclStatus

__all__ = ["Calls", "Groups"]


class Calls:
    """The calls that use one communicator, until it ends. Any thread may use it.

    Attributes:
        end: why new calls are refused: this rank has ``"aborted"`` or ``"destroyed"`` the communicator, or is
            about to; empty before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self.end = ""
        self._taken = False

    def enter(self, function: str) -> None:
        """Announces a call; :meth:`leave` must follow.

        Raises:
            NcclError: the communicator ends or has ended.
        """
        with self._lock:
            if self.end:
                raise NcclError(
                    NcclStatus.INVALID_USAGE, function, f"this rank has {self.end} the communicator"
                )
            self._inside += 1

    def leave(self) -> None:
        """Tells that a call is over."""
        with self._lock:
            self._inside -= 1
            if self.end:
                self._changed.notify_all()

    @contextmanager
    def entered(self, function: str) -> Iterator[None]:
        """Announces a call for the length of a ``with`` block."""
        self.enter(function)
        try:
            yield
        finally:
            self.leave()

    def close(self, end: str, own: int, patience: float | None) -> bool:
        """Refuses new calls and waits for those under way.

        Args:
            end: what happens to the communicator: ``"aborted"`` overtakes a waiting ``"destroyed"``.
            own: calls of this thread, which are not waited for.
            patience: seconds to wait; ``None`` for no limit.

        Returns:
            Whether the caller is the one to end the communicator.
        """
        with self._lock:
            if self.end in ("aborted", end):
                return False
            self.end = end
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._inside <= own or self.end != end, patience)
            if self.end != end or self._taken:
                return False
            self._taken = True
            return True


class Groups:
    """The groups that threads have open, and the communicators with operations in them.

    Until the outermost group of a thread is closed, the communicators count as in use: NCCL has noted them.
    """

    def __init__(self) -> None:
        self._of_thread = _OpenGroups()

    def opened(self) -> None:
        """Notes that this thread opened a group."""
        self._of_thread.depth += 1

    def closed(self) -> None:
        """Notes that this thread closed a group, or tried to without one."""
        mine = self._of_thread
        mine.depth = max(0, mine.depth - 1)
        if mine.depth == 0:
            held, mine.held = mine.held, []
            for calls in held:
                calls.leave()

    def enter(self, calls: Calls, function: str) -> bool:
        """Announces a call, and in a group counts the communicator as in use until the group is closed.

        Returns:
            Whether :meth:`Calls.leave` must follow the call; the end of a group sees to it otherwise.

        Raises:
            NcclError: the communicator ends or has ended.
        """
        mine = self._of_thread
        if calls in mine.held and not calls.end:
            return False
        calls.enter(function)
        if mine.depth:
            mine.held.append(calls)
        return not mine.depth

    def held(self, calls: Calls) -> int:
        """Returns how often this thread's open group counts the communicator: 0 or 1."""
        return int(calls in self._of_thread.held)

    def refuse_open(self, function: str) -> None:
        """Raises an NcclError where this thread has a group open."""
        if self._of_thread.depth:
            raise NcclError(
                NcclStatus.INVALID_USAGE, function, "a group is open on this thread; close it first"
            )


class _OpenGroups(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.held: list[Calls] = []
