"""A thread that watches the flights of one group.

It looks, ten times in a second while there are flights, whether one has landed, has passed its time limit, or
has met an error of its communicator. A flight that is *late* (a second on its way) is looked at more closely:
the group then asks the store about the other ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import Protocol

from collectives.backends.nccl.in_flight import Flight

__all__ = ["Watchdog", "Watched"]

logger = logging.getLogger("collectives")

_TICK_SECONDS = 0.1
_LATE_SECONDS = 1.0
"""After this long, and then again and again after as long, a flight that has not landed is looked into."""


class Watched(Protocol):
    """The part of a group that its watchdog uses; methods are called from the watchdog's thread."""

    def tolerate_captures(self) -> None:
        """Prepares the thread for asking for events."""

    def look_for_errors(self) -> None:
        """Breaks the group if a communicator has met an error."""

    def expire(self, flight: Flight) -> None:
        """Fails a flight that passed its time limit."""

    def look_into(self, late: Flight | None) -> None:
        """Breaks the group if other ranks have ended it, or are gone; called with the oldest late flight.

        Args:
            late: the flight; ``None`` when none is late any more.
        """

    def note_device_error(self, flight: Flight, error: RuntimeError) -> None:
        """Breaks the group after the device has met an error."""


class Watchdog:
    """Watches flights until they have ended.

    Args:
        group: the group; not kept alive.
        name: name of the thread.
    """

    def __init__(self, group: Watched, name: str) -> None:
        self._group = weakref.ref(group)
        self._name = name
        self._flights: list[Flight] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._reported = False
        self._next_look = 0.0

    def watch(self, flight: Flight) -> None:
        """Begins to watch a flight."""
        with self._changed:
            self._flights.append(flight)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif len(self._flights) == 1:
                self._changed.notify()

    def flights(self) -> list[Flight]:
        """Returns the flights that are not known to have ended, oldest first."""
        with self._changed:
            return list(self._flights)

    def stop(self) -> None:
        """Lets the thread end by itself, within a moment."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        group = self._group()
        if group is not None:
            try:
                group.tolerate_captures()
            except Exception:
                logger.exception("%s: cannot prepare for captures of graphs; it goes on", self._name)
        del group
        while self._wait():
            group = self._group()
            if group is None:
                return
            try:
                self._look(group)
            except Exception:
                logger.exception("%s: looking after operations failed; it goes on", self._name)
            del group

    def _wait(self) -> bool:
        """Waits for the next look; returns whether there is to be one."""
        with self._changed:
            while not self._flights and not self._stopped:
                self._changed.wait()
            if not self._stopped:
                self._changed.wait(_TICK_SECONDS)
            return not self._stopped

    def _look(self, group: Watched) -> None:
        for flight in self.flights():
            try:
                ended = flight.ended()
            except RuntimeError as error:
                group.note_device_error(flight, error)
                ended = True
            if ended:
                with self._changed, contextlib.suppress(ValueError):
                    self._flights.remove(flight)
            elif time.monotonic() >= flight.deadline:
                group.expire(flight)
        group.look_for_errors()
        self._look_for_late(group)

    def _look_for_late(self, group: Watched) -> None:
        now = time.monotonic()
        late = next((flight for flight in self.flights() if now - flight.began >= _LATE_SECONDS), None)
        if late is None:
            if self._reported:
                group.look_into(None)
                self._reported = False
        elif now >= self._next_look or not self._reported:
            self._reported = True
            self._next_look = now + _LATE_SECONDS
            group.look_into(late)
