"""Work: the handle of an operation in flight."""

from __future__ import annotations

import contextlib
import copy
import enum
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch.futures import Future

from collectives.dynamo import Uncompiled, leave_uncompiled
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistNetworkError
from collectives.time_limits import seconds_to_wait

Sync = Literal[False]
Async = Literal[True]
"""Values of ``async_op``, which decide what a function returns."""

_T = TypeVar("_T")
_S = TypeVar("_S")
_E = TypeVar("_E", bound=BaseException)


@leave_uncompiled
class CollectiveFuture(Future[_T]):
    """A future of a collective.

    Callbacks that issue collectives from another thread may run in a different order on each rank, so that
    ranks would reduce tensors that do not belong together. So within a backward pass, where communication
    hooks add callbacks between the collectives of the pass, :meth:`then` blocks: it waits for the collective
    and runs the callback itself. Hooks written for NCCL count on that order: its futures are done from the
    start. ``add_done_callback`` never blocks, and is for callbacks that issue no collectives.
    """

    def then(self, callback: Callable[[Future[_T]], _S]) -> Future[_S]:
        """Returns a future of what ``callback`` makes of this one, as torch's; within a backward pass blocks.

        Args:
            callback: gets this future, done.
        """
        if not self.done() and torch._C._current_graph_task_id() >= 0:
            with contextlib.suppress(Exception):  # which the callback gets
                self.wait()
        return super().then(callback)


def fail(future: Future[_T], error: BaseException) -> None:
    """Completes a future with a copy of an error; whoever asks for the value raises a copy of its own.

    The exception itself holds the frames that it was raised through, and these the future. The garbage
    collector cannot see such a cycle, because the future is an object of C++: tensors and group would stay.
    """
    future._set_unwrap_func(_Failure.raise_error)
    future.set_result(_Failure(without_frames(error)))  # type: ignore[arg-type]


class _Failure:
    """Stands for the value of a future that failed.

    Python's callers have it unwrapped. torch's C++ code, such as its gradient reducer, takes no errors that
    Python set; it looks for tensors in the value by means of pickle, and gets the error there.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def raise_error(self) -> NoReturn:
        raise without_frames(self._error)

    def __reduce_ex__(self, _: object) -> NoReturn:
        self.raise_error()


def settle(
    future: Future[list[torch.Tensor]], error: BaseException | None, outputs: Sequence[torch.Tensor]
) -> None:
    """Completes the future of an operation with its outputs, or with its error as :func:`fail` does."""
    if error is None:
        future.set_result(list(outputs))
    else:
        fail(future, error)


def without_frames(error: _E) -> _E:
    """Returns a copy of an error and of its causes that no frame has raised."""
    try:
        fresh = copy.copy(error)
    except Exception:  # noqa: BLE001 - a class that cannot be copied
        return error
    for name in ("__cause__", "cause"):  # the attribute of a DistError
        first = getattr(error, name, None)
        if isinstance(first, BaseException):
            setattr(fresh, name, without_frames(first))
    return fresh


def chain(
    future: Future[_S],
    function: Callable[[Future[_S]], _T],
    devices: Sequence[int | str | torch.device] | None = None,
    kind: type[Future[Any]] | None = None,
) -> Future[_T]:
    """Returns a future of what ``function`` makes of a future that is done.

    Unlike :meth:`torch.futures.Future.then` it keeps the class of an error that ``function`` raises or passes
    on.

    Args:
        future: the future.
        function: gets it.
        devices: CUDA devices of the tensors in what it returns; ``None`` for the current one.
        kind: class of the new future; ``None`` for ``CollectiveFuture`` where ``future`` is one.
    """
    if devices is None:
        on_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = [torch.cuda.current_device()] if on_cuda else []
    if kind is None:
        kind = CollectiveFuture if isinstance(future, CollectiveFuture) else Future
    chained: Future[_T] = kind(devices=list(devices))

    def complete(done: Future[_S]) -> None:
        try:
            value = function(done)
        except Exception as error:  # noqa: BLE001 - handed on
            fail(chained, error)
        else:
            chained.set_result(value)

    future.add_done_callback(complete)
    return chained


class WorkResult(enum.IntEnum):
    """How an operation ended; the value of :meth:`Work.get_future_result`."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    UNKNOWN = 100


class Work(Uncompiled, ABC):
    """An operation that a process group runs: pending, then done or failed.

    Until it is done, its tensors must not be touched; the Work keeps them alive. An error of the operation is
    kept and raised by every :meth:`wait`. A Work that nobody waits for still completes.

    Thread safety: every method may be called from any thread, also at the same time.
    """

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is done.

        CPU tensors: blocks the calling thread with the GIL released. CUDA tensors: makes the current stream
            wait, not the host.

        Args:
            timeout: waits at most this long, then raises; ``None`` or zero leaves it to the operation's own
                limit, and less than zero is a limit that has passed.

        Returns:
            ``True``.

        Raises:
            TypeError: ``timeout`` is no ``timedelta``.
            CollectiveTimeoutError: not done within ``timeout``, or the operation passed its own limit.
            DistBackendError: the operation failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed; never blocks. True after :meth:`wait` returned."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation, ``None`` for one that is pending or done; never blocks."""

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors of a finished operation; they alias the tensors given.

        Raises:
            RuntimeError: the operation is still pending.
        """
        if not self.is_completed():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        error = self.exception()
        if error is not None:
            raise error
        return self._results()

    def _results(self) -> list[Any]:
        """Returns the result of an operation that is done without an error."""
        return []

    @abstractmethod
    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors; always the same one.

        It completes with the operation, or with its error. Callbacks run at once if it is done, else on a
        thread of this package, those of one future in the order in which they were added. They may wait for
        any operation and any future, and issue operations, those of a group in the same order on all ranks.
        Therefore ``then`` of a collective's future, called within a backward pass, waits for the operation
        and runs the callback on the calling thread.

        Futures of one group complete one after the other, in the order in which their operations ended. The
        callbacks of the next one begin when those of the previous one have returned or sleep, but not while
        they wait for a collective that they issued themselves, up to five seconds. Futures that are asked
        for within a callback, and those of other groups, do not wait for it.
        """

    def is_success(self) -> bool:
        """Returns whether the operation is done without an error; never blocks."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Same as :meth:`wait` without a limit."""
        self.wait()

    def source_rank(self) -> int:
        """Returns the rank that a finished receive got its message from, counted within the group.

        Raises:
            RuntimeError: this is no receive, or it is pending.
        """
        raise RuntimeError("source_rank() is known for receives only")

    def _source_rank(self) -> int:
        return self.source_rank()

    def block_current_stream(self) -> None:
        """Makes the current CUDA stream wait for the operation; for CPU tensors the same as :meth:`wait`."""
        self.wait()

    def _rest(self) -> None:
        """Lets a message rest, for a caller that raises instead of waiting for it, or of handing it on.

        Nothing touches its tensor then, and the next receive gets its message, until somebody waits or asks
        whether it is done. Other operations go on, and so does a message that somebody else waits for.
        """

    def get_future_result(self) -> Future[int]:
        """Returns a future of a :class:`WorkResult`; it never carries an error."""

        def code(done: Future[list[torch.Tensor]]) -> int:
            try:
                done.value()
            except CollectiveTimeoutError:
                return int(WorkResult.TIMEOUT)
            except DistNetworkError:
                return int(WorkResult.COMM_ERROR)
            except Exception:  # noqa: BLE001 - any other failure has the code of the unknown
                return int(WorkResult.UNKNOWN)
            return int(WorkResult.SUCCESS)

        return self.get_future().then(code)


_first = threading.RLock()
"""Held while a Work takes its future, which a Work of a fast path has no lock of its own for."""


def take_future(work: Any, made: Future[Any]) -> Future[Any]:
    """Gives a Work the future that was made for it, unless another thread was first; returns the Work's."""
    with _first:
        if work._future is None:
            work._future = made
        future: Future[Any] = work._future
    return future


class CompletedWork(Work):
    """An operation that was done when its call returned.

    Args:
        tensors: its outputs.
        source: sender of a receive, counted within the group.
    """

    __slots__ = ("_future", "_source", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor] = (), source: int | None = None) -> None:
        self._tensors = tensors
        self._source = source
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns ``True`` at once."""
        if timeout is not None:
            seconds_to_wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Returns ``True``."""
        return True

    def exception(self) -> BaseException | None:
        """Returns ``None``."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        return super().source_rank() if self._source is None else self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a completed future of the output tensors."""
        if self._future is None:
            future: Future[list[torch.Tensor]] = Future()
            future.set_result(self.result())
            return take_future(self, future)
        return self._future


COMPLETED = CompletedWork()
"""The Work of every synchronous operation that took the fast path; it knows no outputs."""


class Forwarding(Uncompiled):
    """The methods of an operation that another Work, ``inner``, carries out."""

    __slots__ = ()

    inner: Work

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed; never blocks."""
        return self.inner.is_completed()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation, else ``None``; never blocks."""
        return self.inner.exception()

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors of a finished operation."""
        return self.inner.result()

    def source_rank(self) -> int:
        """Returns the sender of a finished receive, counted within the group."""
        return self.inner.source_rank()

    def block_current_stream(self) -> None:
        """Makes the current CUDA stream wait; for CPU tensors the same as :meth:`wait`."""
        self.inner.block_current_stream()

    def get_future(self) -> Future[Any]:
        """Returns a future of the list of output tensors; always the same one."""
        return self.inner.get_future()


class WrappedWork(Forwarding, Work):
    """An operation that another Work carries out; derived classes look on.

    Args:
        inner: that Work.
    """

    __slots__ = ("inner",)

    def __init__(self, inner: Work) -> None:
        self.inner = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operation."""
        return self.inner.wait(timeout)

    def _rest(self) -> None:
        self.inner._rest()


class CoalescedWork(Work):
    """Several operations as one: done when all are, failed when one is.

    Args:
        works: the operations in order of issue.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for every operation, so that none still uses its tensors, then raises the first error."""
        first: Exception | None = None
        limit = seconds_to_wait(timeout)
        deadline = time.monotonic() + limit
        for work in self._works:
            try:
                # Of all together; not zero, which would be no limit.
                work.wait(timedelta(seconds=max(1e-3, deadline - time.monotonic())) if limit > 0.0 else None)
            except Exception as error:  # noqa: BLE001, PERF203 - raised below, after the others ended
                first = first or error
        if first is not None:
            raise first
        return True

    def is_completed(self) -> bool:
        """Returns whether all operations are done or failed."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Returns the first error in order of issue."""
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Returns the outputs of all operations in order of issue."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:
        """Returns a future of the outputs of all operations in order of issue."""
        if self._future is None:

            def outputs(futures: Future[list[Future[list[torch.Tensor]]]]) -> list[torch.Tensor]:
                return [tensor for future in futures.value() for tensor in future.value()]

            futures = [work.get_future() for work in self._works]
            collective = any(isinstance(future, CollectiveFuture) for future in futures)
            kind = CollectiveFuture if collective else Future
            return take_future(self, chain(torch.futures.collect_all(futures), outputs, kind=kind))
        return self._future


class FinishingWork(Work):
    """An operation whose outputs need one more local step, such as writing a dense temporary back.

    The step runs exactly once, on whichever thread first finds the inner operation done; the Work is done
    after it. A step that a signal handler breaks off runs again. Its tensor operations go to that thread's
    stream, and other streams wait for them in :meth:`wait`.

    Args:
        inner: the operation.
        finish: the step; not called where the inner operation failed.
        tensors: outputs of the whole.
        async_op: whether the step runs even if nobody waits. On CUDA devices it never does: it goes to the
            first stream that waits.
        results: its result, and the value of the future; ``None`` for the outputs.
    """

    def __init__(
        self,
        inner: Work,
        finish: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        async_op: bool = True,
        results: Sequence[Any] | None = None,
    ) -> None:
        self._inner = inner
        self._finish: Callable[[], None] | None = finish
        self._result = tensors if results is None else results
        self._lock = threading.RLock()  # a future that is done runs the step inside get_future()
        self._error: BaseException | None = None
        self._future: Future[list[torch.Tensor]] | None = None
        self._devices: list[int | str | torch.device] = [
            *{tensor.device for tensor in tensors if tensor.is_cuda}
        ]
        if async_op and not self._devices:
            with contextlib.suppress(DistBackendError):  # no thread for it: left to those who wait
                self.get_future()

    def _results(self) -> list[Any]:
        """Returns the result, and the value of the future."""
        return list(self._result)

    def _run_finish(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except Exception as error:  # noqa: BLE001 - kept: every wait() raises it
                    self._error = error
                except BaseException:  # of a signal handler: the step is still to be done
                    self._finish = finish
                    raise
        if self._error is not None:
            raise self._error

    def _finished(self) -> Future[list[torch.Tensor]]:
        """Returns the future; where nobody asked for it yet, runs the step here, on the current stream."""
        with self._lock:
            if self._future is None:
                future: Future[list[torch.Tensor]] = Future(devices=self._devices)
                try:
                    self._run_finish()
                except Exception as error:  # noqa: BLE001 - whoever waits raises it
                    fail(future, error)
                else:
                    future.set_result(self._results())
                self._future = future
            return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operation and for the step, which runs now unless it has its place already."""
        self._inner.wait(timeout)
        self._finish_here()
        return True

    def _finish_here(self) -> None:
        """Runs the step, unless that was done; on CUDA devices, makes the current stream wait for it."""
        if self._devices:
            self._finished().wait()
        else:  # not the future's callbacks: they may be waiting for this
            self._run_finish()

    def is_completed(self) -> bool:
        """Returns whether operation and step are done; runs the step where only that is missing."""
        if not self._inner.is_completed():
            return False
        if self._inner.exception() is None:
            with contextlib.suppress(Exception):  # kept in exception()
                self._finish_here()
        return True

    def exception(self) -> BaseException | None:
        """Returns the error of the operation or of the step."""
        return self._inner.exception() or self._error

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        return self._inner.source_rank()

    def _rest(self) -> None:
        self._inner._rest()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors, completed after the step."""
        with self._lock:
            if self._future is None:

                def finished(inner: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
                    inner.value()
                    self._run_finish()
                    return self._results()

                self._future = chain(self._inner.get_future(), finished, self._devices)
            return self._future


def finish(work: Work, async_op: bool) -> Work | None:
    """Returns what a user function returns: the Work, or ``None`` once the operation is done.

    Args:
        work: the operation's Work.
        async_op: whether the user asked for it; else this blocks until the operation is done.

    Raises:
        DistBackendError: the operation failed.
    """
    if async_op:
        return work
    if work is not COMPLETED:
        work.wait()
    return None
