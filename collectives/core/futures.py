"""Futures of operations, and what becomes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.futures import Future

from collectives.core.callback_order import CallbackOrder, Turn, current_order, current_turn, guard
from collectives.dynamo import leave_uncompiled

_T = TypeVar("_T")
_S = TypeVar("_S")
_E = TypeVar("_E", bound=BaseException)


@leave_uncompiled
class OperationFuture(Future[_T]):
    """A future of an operation.

    That of a collective has a turn of the backward pass within which it is asked for
    (:mod:`collectives.core.callback_order`), that of a message from the first callback on. So have those that
    :meth:`then` makes of it, and those that callbacks ask for. Where there are CUDA tensors, it has none:
    callbacks run on streams that torch chooses.

    Args:
        devices: CUDA devices of its tensors.
        after: a future in a callback of which this one is completed.
        message: whether the operation is a message.
        group: what stands for the group of the operation, if it is one.
        outputs: its outputs.
    """

    _turn: Turn | None = None
    _is_first = False
    _is_open = False
    _is_done = False

    def __init__(
        self,
        *,
        devices: Sequence[int | str | torch.device] = (),
        after: Future[Any] | None = None,
        message: bool = False,
        group: object = None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(devices=list(devices))
        self._may_have_turn = not devices
        if devices:
            return
        self._operation = group, outputs
        turn = after._turn if isinstance(after, OperationFuture) else None
        turn = turn or current_turn()
        if turn is not None:
            self._turn = turn
            self._is_open = True
            turn.open()
        elif not message:
            self._take_turn()

    def _take_turn(self) -> None:
        """Gives it the next turn of the pass that the calling thread runs, if any."""
        order = current_order()
        if order is None:
            return
        turn = order.add_turn(*self._operation)
        with guard():
            self._turn = turn
            self._is_first = self._is_open = True
            done = self._is_done
        if done:
            self._close()

    @property
    def order(self) -> CallbackOrder | None:
        """The order of the pass that it belongs to."""
        return None if self._turn is None else self._turn.order

    def wait(self) -> _T:
        """Blocks until it is done; returns its value, or raises its error."""
        turn = self._turn
        if turn is None or self.done() or (current_turn() is None and current_order() is not turn.order):
            return super().wait()
        with turn.order.lent(turn, self):
            return super().wait()

    def then(self, callback: Callable[[Future[_T]], _S]) -> Future[_S]:
        """Returns a future of what ``callback`` makes of this one, as torch's.

        Args:
            callback: gets this future, done.
        """
        if not self._is_ordered():
            return super().then(callback)
        turn = self._turn
        issues = current_turn() is None and turn is not None and not turn.next_is_quiet
        if issues and current_order() is self.order:
            return self._then_here(callback)
        return chain(self, callback, ())

    def _then_here(self, callback: Callable[[Future[_T]], _S]) -> Future[_S]:
        result: OperationFuture[_S] = OperationFuture(after=self)
        if self._turn is not None:
            self._turn.add_here(partial(_complete, result, callback, self), result)
        return result

    def add_done_callback(self, callback: Callable[[Future[_T]], None]) -> None:
        """Has ``callback`` called with this future when it is done."""
        if self._is_ordered() and self._turn is not None and current_turn() is None:
            self._turn.add(partial(callback, self))
        else:
            super().add_done_callback(callback)

    def _is_ordered(self) -> bool:
        if self._turn is None and self._may_have_turn and current_turn() is None:
            self._take_turn()
        return self._turn is not None and (current_turn() is not None or not self._turn.order.is_over)

    def set_result(self, result: _T) -> None:
        """Completes it."""
        turn = self._turn
        if turn is None:
            super().set_result(result)
        else:
            with turn.here():
                super().set_result(result)
        with guard():
            self._is_done = True
        self._close()

    def _close(self) -> None:
        with guard():
            was_open, self._is_open = self._is_open, False
        if was_open and self._turn is not None:
            self._turn.close(due=self._is_first and self._is_done)

    def __del__(self) -> None:
        self._close()


def tell_when_done(future: Future[Any], tell: Callable[[], None]) -> None:
    """Has something called when a future is done, before callbacks of users are; it issues nothing."""
    if isinstance(future, OperationFuture):
        Future.add_done_callback(future, lambda _: tell())
    else:
        future.add_done_callback(lambda _: tell())


def chain(
    future: Future[_S],
    function: Callable[[Future[_S]], _T],
    devices: Sequence[int | str | torch.device] | None = None,
    *,
    of_operations: bool = False,
) -> Future[_T]:
    """Returns a future of what ``function`` makes of a future that is done.

    Unlike :meth:`torch.futures.Future.then` it keeps the class of an error that ``function`` raises or passes
    on.

    Args:
        future: the future.
        function: gets it.
        devices: CUDA devices of the tensors in what it returns; ``None`` for the current one.
        of_operations: whether the future stands for several :class:`OperationFuture`.
    """
    if devices is None:
        on_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = [torch.cuda.current_device()] if on_cuda else []
    chained: Future[_T]
    if of_operations or isinstance(future, OperationFuture):
        chained = OperationFuture(devices=devices, after=future)
    else:
        chained = Future(devices=list(devices))

    future.add_done_callback(partial(_complete, chained, function))
    return chained


def _complete(future: Future[_T], function: Callable[[Future[_S]], _T], done: Future[_S]) -> None:
    try:
        value = function(done)
    except Exception as error:  # noqa: BLE001 - handed on
        fail(future, error)
    else:
        future.set_result(value)


def settle(
    future: Future[list[torch.Tensor]], error: BaseException | None, outputs: Sequence[torch.Tensor]
) -> None:
    """Completes the future of an operation with its outputs, or with its error as :func:`fail` does."""
    if error is None:
        future.set_result(list(outputs))
    else:
        fail(future, error)


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
    Python set; it looks for tensors in the value by means of pickle, and gets the error there, or says that
    this is no tensor, with the words of the error.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __repr__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"

    def raise_error(self) -> NoReturn:
        raise without_frames(self._error)

    def __reduce_ex__(self, _: object) -> NoReturn:
        self.raise_error()


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
