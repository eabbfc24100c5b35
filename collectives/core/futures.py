"""Futures of operations, whose callbacks issue collectives in one order on all ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.futures import Future

import collectives._native as _native
from collectives.dynamo import leave_uncompiled

__all__ = ["OperationFuture"]

_T = TypeVar("_T")
_S = TypeVar("_S")

_issues: weakref.WeakKeyDictionary[CodeType, bool] = weakref.WeakKeyDictionary()
"""Which callbacks have issued operations, of those that were added in a backward pass."""


@leave_uncompiled
class OperationFuture(Future[_T]):
    """A future of an operation.

    A callback that issues collectives does so beside the thread that issued the operation, in an order that
    other ranks need not have: ranks would add up what does not belong together. NCCL has no such callbacks:
    its futures are done from the start. So within a backward pass, where communication hooks add callbacks
    while the thread goes on to issue collectives, :meth:`then` waits for the operation and runs a callback
    that issues any. Whether it does is known of its code from the first time on, which takes it for one that
    does; so all ranks decide alike.

    Args:
        devices: CUDA devices of its tensors.
    """

    def __init__(self, *, devices: Sequence[int | str | torch.device] = ()) -> None:
        super().__init__(devices=list(devices))

    def then(self, callback: Callable[[Future[_T]], _S]) -> Future[_S]:
        """Returns a future of what ``callback`` makes of this one, as torch's; within a backward pass blocks.

        Args:
            callback: gets this future, done.
        """
        code = _code_of(callback)
        if code is None or torch._C._current_graph_task_id() < 0:
            return super().then(callback)

        def observed(done: Future[_T]) -> _S:
            before = _native.issued_here()
            value = callback(done)  # one that raises may do so before it issues anything
            _issues[code] = _issues.get(code, False) or _native.issued_here() != before
            return value

        if not self.done() and _issues.get(code, True):
            with contextlib.suppress(Exception):  # which the callback gets
                self.wait()
        return super().then(observed)


def _code_of(callback: Any) -> CodeType | None:
    """Returns the code that a callback runs, ``None`` where Python has none."""
    function = getattr(callback, "func", callback)  # of functools.partial
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
