"""How operations of a group are issued: the short way that most can take, and the way of all others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from collectives.core.dynamo import leave_uncompiled
from collectives.core.work import CoalescedWork, Work
from collectives.errors import UnsupportedOperationError
from collectives.torch_bridge import dispatch_modes as onlookers
from collectives.torch_bridge import profiling
from collectives.torch_bridge.callers import SETS_LIMIT
from collectives.torch_bridge.group_base import Standing, missing
from collectives.torch_bridge.operands import arrived
from collectives.torch_bridge.work import BatchedWork, DoneWork, TorchWork

__all__ = ["NO_LIMIT", "UNREAD", "Issuing", "calling_frame"]

NO_LIMIT = timedelta(0)
"""The longest time in torch's records that stands for no limit of their own."""

UNREAD: DoneWork = DoneWork()
"""The Work of synchronous operations whose callers ask nothing of it."""
UNREAD.outputs = ()

calling_frame = sys._getframe
"""Returns the frame so many calls above the one that asks."""


@leave_uncompiled
class Issuing(Standing):
    """The part of :class:`~collectives.torch_bridge.group.TorchGroup` below its operations."""

    def _issue(
        self, event: str, shown: Any, method: Callable[..., Work], *args: Any, seen: Any = None, **kwargs: Any
    ) -> TorchWork:
        """Issues an operation of the inner group.

        Args:
            event: name of the profiler event, without the backend.
            shown: tensors whose shapes the event shows.
            method: method of the inner group.
            *args: its arguments; torch's option records among them are converted.
            seen: name and arguments of the method of this class, to be shown to dispatch modes.
            **kwargs: its keyword arguments.
        """
        if seen is not None and onlookers.possible() and (done := onlookers.show(self, *seen)):
            return done
        work: Work | None
        try:
            if profiling.possible() and profiling.enabled():
                work = profiling.observed(
                    f"{self._backend_name}:{event}", shown, lambda: method(*args, **kwargs)
                )
            else:
                work = method(*args, **kwargs)
        except TypeError:  # before any communication, as arguments are checked first
            args, waited = arrived(args)
            if not waited:
                raise
            work = None
        except UnsupportedOperationError as error:
            kinds = {
                tensor.device.type for tensor in profiling.flat([shown])
            } - self.inner.capabilities.devices
            if kinds:
                raise UnsupportedOperationError(f"{error}{missing(kinds.pop())}") from None
            raise
        if work is None:
            return self._issue(event, shown, method, *args, **kwargs)
        self._sequence = next(self._issued)
        if self._batches:
            batch = self._batches.get(threading.get_ident())
            if batch is not None:
                batch[0].append(work)
                return BatchedWork(work)
        return TorchWork(work)

    def _at_once(
        self,
        opts: Any,
        kind: int,
        output: Any = None,
        input: Any = None,
        code: int | None = 0,
        root: object = 0,
        listed: bool = False,
    ) -> TorchWork | None:
        """Issues a collective where the inner group takes the arguments as they are, as it does most.

        The way of :meth:`_issue` reads all of torch's record into one of ours, which takes longer than a
        small operation.

        Args:
            opts: torch's option record.
            kind: number of the collective, of :mod:`collectives.core.opcodes`.
            output: what is written, or read and written.
            input: what is only read.
            code: code of the reduction; ``None`` for one that has a factor.
            root: the root.
            listed: whether the larger operand is a list of a tensor for each rank.

        Returns:
            The Work; ``None`` with nothing done, to go the other way.
        """
        if code is None:
            return None
        if onlookers.possible() and (given := onlookers.show_plain(self, opts, kind, output, input, listed)):
            return given
        # of what calls the method that this one is called by; looked up before the operation, as its code and
        # data are in the caches then
        sets_limit = SETS_LIMIT.get(id(calling_frame(2).f_code))
        if self._batches or profiling.possible() or (sets_limit is not False and opts.timeout > NO_LIMIT):
            return None
        if opts.asyncOp:
            work = self.inner.plain_launch(kind, output, input, code, root, listed)
            if work is None:
                return None
            self._sequence = next(self._issued)
            return TorchWork(work)
        if not self._plain(kind, output, input, code, root, listed):
            return None
        self._sequence = next(self._issued)
        if sets_limit is not None:
            return UNREAD
        done: DoneWork = DoneWork()
        done.outputs = () if output is None else output
        return done

    def _start_coalescing(self, device: Any = None) -> None:  # noqa: ARG002
        left_open = self._batches.pop(threading.get_ident(), None)
        if left_open is not None:  # by an exception: what the group kept back of the block is dropped
            left_open[1].__exit__(RuntimeError, RuntimeError("the block was left by an exception"), None)
        together = ExitStack()
        together.enter_context(self.inner._together())
        self._batches[threading.get_ident()] = [], together

    def _end_coalescing(self, device: Any = None) -> TorchWork:  # noqa: ARG002
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            raise RuntimeError(f"[rank {self.rank()}] {self!r}: no coalescing block is open on this thread")
        works, together = batch
        together.close()
        return TorchWork(CoalescedWork(works))

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing
