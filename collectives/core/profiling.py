"""Profiler events of operations, named as torch names those of its own backends (``gloo:all_reduce``).

Public methods of groups show an operation while a profiler records, whoever calls them; the fast paths take
nothing then, so that no operation goes past those methods. What a composition, or torch's front end, issues
in turn on its groups is part of its own event.

An event begins on the thread that issues an operation and ends when the operation does; between the two it is
open. A session lies between the start and the stop of a profiler; it records what happens on the thread that
started it, and on others only where they run with that thread's state.

Ends have two rules. They carry the number of their thread, and torch shows an event as asynchronous where
that is not the one where it began: so one thread of this module ends all events, with the state of the thread
where each began. And an end writes into the record of its session, which is gone when that stops: so events
that are still open end just before. (torch 2.11 would leave out of a profile what has no end.)
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from collectives.core.work import CompletedWork, Work, WrappedWork
from collectives.threads import start_thread

profiler: Any = torch.autograd.profiler
"""For fast paths, which look at its flag: the quickest way to see that no thread is recorded."""

enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Returns whether a profiler records on this thread."""


def possible() -> bool:
    """Returns whether a profiler records on any thread; quicker than :data:`enabled`."""
    recording: bool = profiler._is_profiler_enabled
    return recording


def flat(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested lists."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)


_issuing = threading.local()
"""``inside``: whether this thread issues an operation whose event has begun; ``title``: a name for events."""


@contextmanager
def record_comm(name: str) -> Generator[None]:
    """Gives profiler events of the operations that this thread issues in the ``with`` block another name.

    Without it they are called by backend and operation, such as ``host:all_reduce``. Does not communicate. In
    a block within another the inner name counts.

    Args:
        name: what profilers show; an empty one leaves the names as they are.

    Yields:
        Nothing.

    Example:
        With 2 ranks::

            with collectives.record_comm("average of the losses"):
                collectives.all_reduce(torch.ones(1))
    """
    before = getattr(_issuing, "title", "")
    _issuing.title = name
    try:
        yield
    finally:
        _issuing.title = before


def observed(name: str, inputs: Any, issue: Callable[[], Work]) -> Work:
    """Issues an operation under an event that ends when the operation does; returns its Work.

    To be called where :data:`enabled` says so.

    Args:
        name: name of the event, unless :func:`record_comm` gives another one.
        inputs: tensors, or lists of them, whose shapes the event shows.
        issue: issues the operation; operations that it issues in turn show no events of their own.
    """
    if getattr(_issuing, "inside", False):
        return issue()
    event = _Event(getattr(_issuing, "title", "") or name, inputs)
    _issuing.inside = True
    try:
        work = issue()
    except BaseException:
        event.end()
        raise
    finally:
        _issuing.inside = False
    if isinstance(work, CompletedWork):
        event.end()
        return work
    # Before any callback of the caller, so that whoever hears of the result finds the event ended. Not asked
    # whether it is done: a Work of a batch is good only after that.
    work.get_future().add_done_callback(lambda _: event.end())
    return _ObservedWork(work, event)


class _Event:
    """The event of one operation.

    Args:
        name: its name.
        inputs: tensors, or lists of them, whose shapes it shows.
    """

    def __init__(self, name: str, inputs: Any) -> None:
        self._ended = threading.Event()
        self._end: Future[None] | None = Future()
        _events.start()
        record = torch._C._autograd._record_function_with_args_enter(name, *flat(inputs))
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, self._end)
        _events.add(self)

    def end(self) -> None:
        """Ends the event unless that was done or it was dropped; afterwards it has ended."""
        _events.end(self)
        self._ended.wait()

    def close(self, *, record: bool) -> None:
        """Records the end, or drops the event; called once, on the thread that ends events."""
        end, self._end = self._end, None
        if record and end is not None:
            end.set_result(None)
        # here the record goes: on a thread that belongs to no session it writes nothing any more
        del end
        self._ended.set()


class _Events:
    """The open events of this process, and the thread that ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[_Event] = set()
        self._ending: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._disable: Callable[[], Any] | None = None

    def start(self) -> None:
        """Sees to it that there is a thread to end events on."""
        with self._lock:
            if self._thread is None:
                self._thread = start_thread(self._serve, "collectives-profiler")

    def add(self, event: _Event) -> None:
        with self._lock:
            self._open.add(event)
            if self._disable is None:
                # torch tells nobody that a session is about to stop
                self._disable = profiler._disable_profiler
                profiler._disable_profiler = self._stop_session

    def end(self, event: _Event) -> None:
        """Has an event ended, if it is open."""
        with self._lock:
            if event in self._open:
                self._open.remove(event)
                self._ending.put(partial(event.close, record=True))

    def close_all(self, *, record: bool) -> None:
        """Ends all open events, or drops them; returns when those that were being ended have ended too."""
        with self._lock:
            closed, self._open = self._open, set()
            if self._thread is None:
                return
        done = threading.Event()
        for event in closed:
            self._ending.put(partial(event.close, record=record))
        closed.clear()
        self._ending.put(done.set)
        done.wait()

    def _stop_session(self) -> Any:
        with self._lock:
            disable, self._disable = self._disable, None
        if disable is None:  # another thread stopped a session meanwhile
            return profiler._disable_profiler()
        profiler._disable_profiler = disable
        self.close_all(record=True)
        return disable()

    def _serve(self) -> None:
        while (step := self._ending.get()) is not None:
            step()
            del step

    def close(self) -> None:
        """Ends the thread."""
        self.close_all(record=False)
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.put(None)
            thread.join()


_events = _Events()


def _start_over() -> None:
    """In a forked child, where the thread does not exist."""
    global _events
    disable, _events = _events._disable, _Events()
    if disable is not None:
        profiler._disable_profiler = disable


os.register_at_fork(after_in_child=_start_over)


@atexit.register
def _close() -> None:
    _events.close()


class _ObservedWork(WrappedWork):
    """An operation whose event has ended when its Work says that the operation is done.

    The event ends before callbacks of the future's users run.

    Args:
        inner: the operation.
        event: its event.
    """

    def __init__(self, inner: Work, event: _Event) -> None:
        super().__init__(inner)
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operation and for the end of its event."""
        try:
            return self.inner.wait(timeout)
        finally:
            self.is_completed()

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed."""
        done = self.inner.is_completed()
        if done:
            self._event.end()
        return done
