"""One order on all ranks for the collectives that callbacks of futures issue within a backward pass.

A callback runs when its operation is done, beside the thread that issued it, and so at another time on each
rank. Communication hooks add callbacks while their thread goes on to issue collectives, and ranks would add
up what does not belong together. NCCL has no such callbacks: its futures are done from the start, ``then``
runs callbacks, and torch's hooks count on it.

So ``then`` waits for the operation and runs the callback, unless the same callback of an operation of the
same group, with the same data types and sizes, issued no collective in an earlier pass and none has since:
then it runs beside the pass. This is known of operations, in which all ranks are alike, and learned at the
end of passes. Where such a callback comes to issue a collective after all, it waits there for its turn, and
turns come at points of the program, which are the same on all ranks:

- While the thread of the pass waits for a future that callbacks of an operation make, it is their turn.
- At the end of the pass each operation has its turn, in the order in which their futures were asked for. The
  pass ends when all callbacks have returned.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.futures import Future

import collectives._native as _native
from collectives.core.completions import complete_later, next_operation
from collectives.dynamo import Uncompiled
from collectives.errors import GroupAbortedError
from collectives.logs import Log

_log = Log("collectives.futures")

_current_task: Callable[[], int] = torch._C._current_graph_task_id
_queue_callback: Callable[[Callable[[], None]], None]
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


_LONG_SECONDS = 60.0


class _Here(threading.local):
    order: CallbackOrder | None = None
    turn: Turn | None = None


_here = _Here()
_changed = threading.Condition()
"""Guards all that follows, and tells of it."""
_of_tasks: dict[int, CallbackOrder] = {}

_Key = tuple[tuple[tuple[torch.dtype, int], ...], int]
"""Data types and sizes of an operation's tensors, and the number of a callback."""
_MOST_KEYS = 10_000
_quiet: weakref.WeakKeyDictionary[object, dict[_Key, bool]] = weakref.WeakKeyDictionary()
"""For each group, whether callbacks have issued no collective so far."""


def current_order() -> CallbackOrder | None:
    """Returns the order of the pass that the calling thread runs, ``None`` outside of any."""
    if _here.order is not None:
        return _here.order
    task = _current_task()
    if task < 0:
        return None
    with _changed:
        order = _of_tasks.get(task)
        if order is None:
            order = CallbackOrder()
            _EndOfTask(order, task)
            _of_tasks[task] = order
    return order


def guard() -> threading.Condition:
    """Returns what guards turns."""
    return _changed


def current_turn() -> Turn | None:
    """Returns the turn of the callback that the calling thread runs, ``None`` outside of any."""
    return _here.turn


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Lets a callback of this package issue collectives whose order it sees to itself."""
    before, _here.turn = _here.turn, None
    _native.set_in_callback(False)
    try:
        yield
    finally:
        _here.turn = before
        _native.set_in_callback(before is not None)


def await_turn() -> None:
    """Blocks until the callback that the calling thread runs may issue a collective.

    Raises:
        GroupAbortedError: the pass was broken off.
    """
    if _here.turn is not None:
        _here.turn.wait()


class CallbackOrder(Uncompiled):
    """The turns of the operations of one backward pass."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._waits: list[tuple[Turn | None, Turn | None, Future[Any]]] = []
        self._is_broken = False
        self.is_over = False

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Makes it the order of the calling thread; elsewhere that is the order of its task of autograd."""
        before, _here.order = _here.order, self
        try:
            yield
        finally:
            _here.order = before

    def add_turn(self, group: object, outputs: Sequence[torch.Tensor]) -> Turn:
        """Returns the turn of one more operation, whose future is not done.

        Args:
            group: what stands for its group; ``None`` where there are several operations.
            outputs: its outputs.
        """
        turn = Turn(self, group, tuple((tensor.dtype, tensor.numel()) for tensor in outputs))
        with _changed:
            turn.open()
            self._turns.append(turn)
        return turn

    @contextlib.contextmanager
    def lent(self, turn: Turn | None, future: Future[Any]) -> Iterator[None]:
        """Gives an operation its turn while the caller waits for a future.

        Args:
            turn: that of the operation; ``None`` for each operation in order.
            future: the future; the turn ends as soon as it is done.
        """
        wait = (_here.turn, turn, future)
        with _changed:
            self._waits.append(wait)
            _changed.notify_all()
        try:
            yield
        finally:
            with _changed:
                self._waits.remove(wait)

    def wait(self, future: Future[Any]) -> Any:
        """Waits for any future that a hook of this pass returned, as the thread of the pass."""
        with self.here():
            if getattr(future, "order", None) is self:
                return future.wait()
            with self.lent(None, future):
                return future.wait()

    def finish(self) -> None:
        """Ends the pass; blocks until all operations have had their turn."""
        with _changed:
            self.let_go()
            _changed.wait_for(lambda: self._first() is None)
            for turn in self._turns:
                turn.learn()
            self._turns.clear()

    def let_go(self) -> None:
        """Ends the pass; the operations have their turns while the caller goes on."""
        with _changed:
            self.is_over = True
            _changed.notify_all()

    def break_off(self) -> None:
        """Ends the pass; callbacks issue nothing more."""
        with _changed:
            self._is_broken = True
            self.let_go()

    def _first(self) -> Turn | None:
        return next((turn for turn in self._turns if not turn.has_ended), None)

    def _may_issue(self, turn: Turn, asking: tuple[Turn, ...] = ()) -> bool:
        if self._is_broken or (self.is_over and self._first() is turn):
            return True
        return any(
            (waited is turn or (waited is None and self._first() is turn))
            and not future.done()
            and (by is None or (by is not turn and by not in asking and self._may_issue(by, (*asking, turn))))
            for by, waited, future in self._waits
        )

    def wait_for(self, turn: Turn) -> None:
        """Blocks until it is the turn of an operation."""
        with _changed:
            turn.note_issue()
            if not self._may_issue(turn):
                _native.let_next_begin()
                if not _changed.wait_for(lambda: self._may_issue(turn), _LONG_SECONDS):
                    _log.warning(
                        "a callback has waited for %g s to issue a collective: it waits for the end of the "
                        "backward pass within which it was added, or for that to wait for the future that "
                        "then() returned",
                        _LONG_SECONDS,
                    )
                    _changed.wait_for(lambda: self._may_issue(turn))
        if self._is_broken:
            raise GroupAbortedError(
                "the backward pass within which this callback was added was broken off, so that it must not "
                "issue collectives any more"
            )


class Turn(Uncompiled):
    """What one operation of a pass has to do when it is done: callbacks, one after the other.

    Attributes:
        order: the turns of the pass.
    """

    __slots__ = (
        "_added", "_callbacks", "_group", "_is_due", "_issued", "_open", "_runs", "_started", "_tensors",
        "_waited", "order",
    )  # fmt: skip

    def __init__(
        self, order: CallbackOrder, group: object, tensors: tuple[tuple[torch.dtype, int], ...]
    ) -> None:
        self.order = order
        self._group = group
        self._tensors = tensors
        self._open = 0  # futures that are not done
        self._callbacks: deque[Callable[[], object]] = deque()
        self._added = 0
        self._started = 0
        self._waited = False  # the thread of the pass, for a callback
        self._issued: set[int] = set()  # which callbacks have issued collectives
        self._is_due = False
        self._runs = False

    @property
    def has_ended(self) -> bool:
        """Whether the operation is done and all callbacks have returned, those within them as well."""
        return not (self._open or self._callbacks or self._runs)

    def wait(self) -> None:
        """Blocks until one of its callbacks may issue a collective."""
        self.order.wait_for(self)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Makes what the calling thread runs a callback of the operation."""
        before, _here.turn = _here.turn, self
        _native.set_in_callback(True)
        try:
            yield
        finally:
            _here.turn = before
            _native.set_in_callback(before is not None)

    def open(self) -> None:
        """Takes note of a future that is to be completed before the turn ends."""
        with _changed:
            self._open += 1

    def close(self, *, due: bool = False) -> None:
        """Takes note that a future is done, or never will be.

        Args:
            due: whether it is that of the operation, so that callbacks begin.
        """
        with _changed:
            self._open -= 1
            self._is_due |= due
            begins = self._begin()
            _changed.notify_all()
        if begins:
            # Not within a callback of another operation, nor on the thread that issues.
            if _here.turn is None and current_order() is not self.order:
                self._run_callbacks()
            else:
                self._run_elsewhere()

    def add(self, callback: Callable[[], object]) -> None:
        """Has a callback called after those added before, once the operation is done; never right here."""
        with _changed:
            self._append(callback)
            begins = self._begin()
        try:
            if begins:
                self._run_elsewhere()
        except BaseException:  # no thread can be started
            with _changed:
                self._callbacks.clear()
                self._runs = False
            raise

    def add_here(self, callback: Callable[[], object], result: Future[Any]) -> None:
        """Calls a callback, after those added before and once the operation is done; blocks until then.

        Args:
            callback: the callback.
            result: what it completes.
        """
        with self.order.lent(self, result):
            with _changed:
                _changed.wait_for(lambda: self._is_due and not self._callbacks and not self._runs)
                self._append(callback)
                self._runs = self._waited = True
            self._run_callbacks()

    @property
    def next_is_quiet(self) -> bool:
        """Whether the next callback to be added, and those before, are known for issuing no collective."""
        with _changed:
            known = {} if self._group is None or self._waited else _quiet.get(self._group, {})
            return known.get((self._tensors, self._added), False)

    def note_issue(self) -> None:
        """Takes note that the callback in progress issues a collective."""
        self._issued.add(self._started - 1)

    def learn(self) -> None:
        """Remembers which callbacks have issued collectives."""
        if self._group is not None and self._added:
            known = _quiet.setdefault(self._group, {})
            if len(known) > _MOST_KEYS:
                known.clear()
            for number in range(self._added):
                key = self._tensors, number
                known[key] = known.get(key, True) and number not in self._issued

    def _append(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)
        self._added += 1

    def _begin(self) -> bool:
        begins = self._is_due and bool(self._callbacks) and not self._runs
        self._runs |= begins
        return begins

    def _run_elsewhere(self) -> None:
        complete_later(next_operation(), id(self), self._run_callbacks, collective=False)()

    def _run_callbacks(self) -> None:
        with self.here():
            while True:
                with _changed:
                    if not self._callbacks:
                        self._runs = False
                        _changed.notify_all()
                        return
                    callback = self._callbacks.popleft()
                    self._started += 1
                try:
                    callback()
                except Exception:  # noqa: BLE001 - others follow
                    _log.exception("a callback of a future failed")
                del callback


class _EndOfTask(Uncompiled):
    """Ends the order of a task of autograd with it; the engine drops this uncalled where the task failed."""

    def __init__(self, order: CallbackOrder, task: int) -> None:
        self._order: CallbackOrder | None = None
        self._task = task
        _queue_callback(self._finish)
        self._order = order

    def _finish(self) -> None:
        order = self._leave()
        if order is not None:
            order.finish()

    def _leave(self) -> CallbackOrder | None:
        order, self._order = self._order, None
        if order is not None:
            with _changed:
                del _of_tasks[self._task]
        return order

    def __del__(self) -> None:
        order = self._leave()
        if order is not None:
            order.let_go()


def _start_over() -> None:
    """In a forked child, where no callback runs."""
    global _changed
    _changed = threading.Condition()
    _of_tasks.clear()


os.register_at_fork(after_in_child=_start_over)
