"""Work of the host backend, and the thread that completes its futures."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

import collectives._native as _native
from collectives.core.work import Work, fail

if TYPE_CHECKING:
    from collectives.backends.host.group import ProcessGroupHost

__all__ = ["HostWork", "as_tuple"]


def as_tuple(operand: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of an operand now, because the caller may change a list of them later."""
    if operand is None:
        return ()
    return (operand,) if isinstance(operand, torch.Tensor) else tuple(operand)


class HostWork(Work):
    """An operation that the core runs in the background.

    Args:
        task: the operation, which keeps its tensors until it is done.
        outputs: its output tensors.
        group: its group, which must stay as long as somebody may wait.
    """

    __slots__ = ("_future", "_group", "_outputs", "_task")

    def __init__(
        self, task: _native.HostTask, outputs: Sequence[torch.Tensor], group: ProcessGroupHost
    ) -> None:
        self._task = task
        self._outputs = outputs
        self._group = group
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks with the GIL released; a signal handler that raises ends the wait.

        A collective goes on then. A message does where somebody else waits for it or a later one has been
        issued; else it rests, and goes on when somebody waits again or asks.
        """
        seconds = timeout.total_seconds() if timeout else None
        if not self._task.wait(seconds):
            raise self._group._native.not_done(self._task, seconds or 0.0)
        self._raise_failure()
        return True

    def _rest(self) -> None:
        self._task.rest()

    def _error(self) -> BaseException | None:
        error = self._task.error()
        if error is not None:
            self._group.flight_record.tell_first_error()
        return error

    def _raise_failure(self) -> None:
        error = self._error()
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed; helps a point-to-point operation on."""
        return self._task.poll()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._error()

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors."""
        if not self._task.finished():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        self._raise_failure()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        if not self._task.finished():
            raise RuntimeError("the operation is still pending; call wait() before source_rank()")
        return super().source_rank() if self._task.source < 0 else self._task.source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future that a thread of the process completes; callbacks of ``then`` run there."""
        with _completions.lock:
            if self._future is not None:
                return self._future
            future: Future[list[torch.Tensor]] = Future()
            self._future = future
        _completions.watch(self)
        return future

    def complete_future(self) -> None:
        """Hands the outcome to the future; called once."""
        if self._future is None:
            return
        error = self._error()
        if error is None:
            self._future.set_result(list(self._outputs))
        else:
            fail(self._future, error)

    @property
    def task(self) -> _native.HostTask:
        """The operation in the core."""
        return self._task


class _Completions:
    """Completes futures on one thread of the process, started when the first future is asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._watched: dict[int, HostWork] = {}
        self._thread: threading.Thread | None = None

    def watch(self, work: HostWork) -> None:
        """Completes the future of ``work`` when it is done, at once where it is."""
        with self.lock:
            self._watched[work.task.id] = work
            if self._thread is None:
                # A daemon, so that it does not hold up the interpreter's exit; `close` ends it then.
                self._thread = threading.Thread(target=self._serve, name="collectives-futures", daemon=True)
                self._thread.start()
        if not work.task.notify():
            self._complete(work.task.id)

    def _complete(self, task_id: int) -> None:
        with self.lock:
            work = self._watched.pop(task_id, None)
        if work is not None:
            work.complete_future()

    def _serve(self) -> None:
        while ids := _native.pop_finished_tasks():
            for task_id in ids:
                self._complete(task_id)

    def close(self) -> None:
        """Ends the thread."""
        with self.lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            _native.close_finished_tasks()
            thread.join()


_completions = _Completions()


def _start_over() -> None:
    """In a forked child, where the thread does not exist."""
    _completions.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)
atexit.register(_completions.close)
