"""How operations of a group are issued: by the fast path, which most take, and by the ordinary methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch

from collectives.core import profiling
from collectives.core.dynamo import leave_uncompiled
from collectives.core.work import COMPLETED, CoalescedWork, Work
from collectives.errors import UnsupportedOperationError
from collectives.torch_bridge import dispatch_modes
from collectives.torch_bridge.group_base import TorchGroupBase, why_not_served
from collectives.torch_bridge.operands import wait_for_async_tensors
from collectives.torch_bridge.work import BatchedWork, DoneWork, TorchWork

__all__ = ["Issuing"]

_NO_LIMIT = timedelta(0)
"""The longest time in torch's records that stands for no limit of their own."""

_profiler: Any = torch.autograd.profiler


@leave_uncompiled
class Issuing(TorchGroupBase):
    """The part of :class:`~collectives.torch_bridge.group.TorchGroup` below its operations."""

    def _issue(
        self,
        event: str,
        tensors: Any,
        method: Callable[..., Work],
        *args: Any,
        operator_call: Any = None,
        **kwargs: Any,
    ) -> TorchWork:
        """Issues an operation of the inner group.

        Args:
            event: name of the profiler event, without the backend.
            tensors: tensors whose shapes it records.
            method: method of the inner group.
            *args: its arguments.
            operator_call: name and arguments of the method of this class, for dispatch modes.
            **kwargs: its keyword arguments.
        """
        if (
            operator_call is not None
            and dispatch_modes.possible()
            and (done := dispatch_modes.issue_by_operator(self, *operator_call))
        ):
            return done
        work: Work | None
        try:
            if profiling.possible() and profiling.enabled():
                work = profiling.observed(
                    f"{self._backend_name}:{event}", tensors, lambda: method(*args, **kwargs)
                )
            else:
                work = method(*args, **kwargs)
        except TypeError:  # before any communication, as arguments are checked first
            args, waited = wait_for_async_tensors(args)
            if not waited:
                raise
            work = None
        except UnsupportedOperationError as error:
            devices = {tensor.device.type for tensor in profiling.flat([tensors])}
            devices -= self.inner.capabilities.devices
            if devices:
                raise UnsupportedOperationError(f"{error}{why_not_served(devices.pop())}") from None
            raise
        if work is None:
            return self._issue(event, tensors, method, *args, **kwargs)
        self._sequence = next(self._issued)
        if self._batches:
            batch = self._batches.get(threading.get_ident())
            if batch is not None:
                batch[0].append(work)
                return BatchedWork(work)
        return TorchWork(work)

    def _fast_collective(
        self,
        opts: Any,
        opcode: int,
        output: Any = None,
        input: Any = None,
        reduce_op: int | None = 0,
        root: Any = 0,
        list_form: bool = False,
    ) -> TorchWork | None:
        """Issues a collective by the fast path of the inner group.

        :meth:`_issue` converts torch's whole record into one of ours, which takes longer than a small
        operation.

        Args:
            opts: torch's option record.
            opcode: the collective, one of :mod:`collectives.core.operations`.
            output: what is written, or read and written.
            input: what is only read.
            reduce_op: code of the reduction; ``None`` for one that has a factor.
            root: the root.
            list_form: whether the larger operand is a list of one tensor for each rank.

        Returns:
            The Work; ``None`` with nothing done where :meth:`_issue` is to be called.
        """
        if reduce_op is None:
            return None
        if dispatch_modes.possible() and (
            issued := dispatch_modes.issue_collective_by_operator(
                self, opts, opcode, output, input, list_form
            )
        ):
            return issued
        if self._batches or _profiler._is_profiler_enabled or opts.timeout > _NO_LIMIT:
            return None
        work = self.inner.fast_collective(opcode, output, input, reduce_op, root, list_form, opts.asyncOp)
        if work is None:
            return None
        self._sequence = next(self._issued)
        if work is not COMPLETED:
            return TorchWork(work)
        done: DoneWork = DoneWork()
        done.outputs = () if output is None else output
        return done

    def _fast_message(self, sends: bool, tensor: Any, peer: int, tag: int) -> TorchWork | None:
        """Begins a message by the fast path of the inner group, as :meth:`_fast_collective`."""
        if dispatch_modes.possible() or self._batches or _profiler._is_profiler_enabled:
            return None
        work = self.inner.fast_message(sends, tensor, peer, tag, True)
        if work is None:
            return None
        self._sequence = next(self._issued)
        return TorchWork(work)

    def _start_coalescing(self, device: Any = None) -> None:  # noqa: ARG002
        self._drop_coalesced()  # of a block that an exception left
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

    def _drop_coalesced(self) -> None:
        """Drops what the group has deferred to the end of the open block, if there is one."""
        left_open = self._batches.pop(threading.get_ident(), None)
        if left_open is not None:
            left_open[1].__exit__(RuntimeError, RuntimeError("the block was left by an exception"), None)

    @contextmanager
    def batch(self) -> Iterator[list[TorchWork]]:
        """Starts the messages that this thread issues in a ``with`` block together, at its end.

        Yields:
            A list, which holds the Work of all of them after the block. An exception drops them.
        """
        whole: list[TorchWork] = []
        self._start_coalescing()
        try:
            yield whole
        except BaseException:
            self._drop_coalesced()
            raise
        whole.append(self._end_coalescing())

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing
