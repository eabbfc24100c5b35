"""Calls of something that may not answer, such as a store whose server was stopped, or a library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from collectives.errors import DistBackendError
from collectives.threads import start_thread

_T = TypeVar("_T")

_LOOK_SECONDS = 0.25


class NoAnswer(TimeoutError):  # noqa: N818 - no error of the call
    """A call has not returned in time."""


class BoundedCalls:
    """Makes calls on threads of their own, one after the other; a call that does not return is left behind.

    Args:
        name: name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._calls = False
        self._latest: Future[Any] | None = None

    def __call__(
        self, function: Callable[[], _T], seconds: float, look: Callable[[], object] | None = None
    ) -> _T:
        """Returns what a function returns, or raises its exception.

        Blocks for twice as long at most from the caller's turn on; callers on several threads take turns.

        Args:
            function: the call.
            seconds: how long to wait for an earlier call, and then for this one.
            look: called now and then while this one is waited for; an exception ends the wait.

        Raises:
            NoAnswer: it has not returned in that time, or an earlier one still has not; or this is called
                by a signal's handler while its own thread waits here.
        """
        with self._lock:
            if self._calls:
                raise NoAnswer(f"a call of {self._name} is under way on this thread")
            try:
                self._calls = True
                return self._call(function, seconds, look)
            finally:
                self._calls = False

    def _call(self, function: Callable[[], _T], seconds: float, look: Callable[[], object] | None) -> _T:
        latest = self._latest
        if latest is not None and not wait_for([latest], timeout=seconds).done:
            raise NoAnswer(f"an earlier call of {self._name} has not returned")
        made: Future[_T] = Future()

        def call() -> None:
            try:
                made.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised below
                made.set_exception(error)

        try:
            start_thread(call, self._name)
        except DistBackendError as error:  # at the interpreter's end no thread begins
            raise NoAnswer(str(error)) from error
        self._latest = made
        end = time.monotonic() + seconds
        pause = seconds if look is None else min(_LOOK_SECONDS, seconds)
        while not wait_for([made], timeout=pause).done:
            if (left := end - time.monotonic()) <= 0:
                raise NoAnswer(f"a call of {self._name} has not returned within {seconds:g} s")
            if look is not None:
                look()
                pause = min(_LOOK_SECONDS, left)
        self._latest = None  # whose exception holds its callers' frames
        return made.result()
