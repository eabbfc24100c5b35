"""A ``torch.distributed.ProcessGroup`` that is carried out by one of ours.

torch reaches a group in four ways, and all of them end here:

- Python functions (``torch.distributed.all_reduce``) call the methods of this class.
- C++ code (the gradient reducer, functional collectives) calls virtual methods, which torch forwards to those
  Python methods that it knows of. Which ones differs between torch versions, as do the names: all names of
  the table of operations are here.
- What C++ does not forward goes through the ``c10d::`` operators, as do direct calls of them. Their kernels
  are ours (:mod:`collectives.torch_bridge.operators`), or torch's, which call a ``Backend`` that hands on to
  the group (:mod:`collectives.torch_bridge.c10d_backend`).
- ``group._get_backend(device)`` gives the object that serves a device: this group itself.

No backend of torch's own is registered in the group, so that whatever should fall through all of these
raises, instead of answering without having communicated.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from collectives.core import profiling
from collectives.core.arguments.calls import overload_arguments
from collectives.core.arguments.option_records import REDUCE_OP_CODES, time_limit_of
from collectives.core.arguments.staging import dense_outputs
from collectives.core.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    GATHER,
    OPERATIONS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
    SCATTER,
    Operand,
    Operation,
)
from collectives.core.work import COMPLETED, CoalescedWork, Work
from collectives.dynamo import leave_uncompiled
from collectives.errors import UnsupportedOperationError
from collectives.torch_bridge import dispatch_modes, several_tensors
from collectives.torch_bridge.group_base import TorchGroupBase, why_not_served
from collectives.torch_bridge.work import BatchedWork, DoneWork, TorchWork

__all__ = ["TorchGroup"]

_NO_LIMIT = timedelta(0)
"""The longest time in torch's records that stands for no limit of their own."""

_HAS_INDICES = hasattr(c10d.AllreduceOptions, "sparseIndices")  # since torch 2.15

_profiler: Any = torch.autograd.profiler

_RECORDS: dict[Operation, Any] = {
    ALL_REDUCE: c10d.AllreduceOptions,
    ALL_REDUCE_COALESCED: c10d.AllreduceCoalescedOptions,
    BROADCAST: c10d.BroadcastOptions,
    REDUCE: c10d.ReduceOptions,
    ALL_GATHER: c10d.AllgatherOptions,
    ALL_GATHER_INTO_TENSOR: c10d.AllgatherOptions,
    GATHER: c10d.GatherOptions,
    SCATTER: c10d.ScatterOptions,
    REDUCE_SCATTER: c10d.ReduceScatterOptions,
    REDUCE_SCATTER_TENSOR: c10d.ReduceScatterOptions,
    ALL_TO_ALL: c10d.AllToAllOptions,
    ALL_TO_ALL_SINGLE: c10d.AllToAllOptions,
    BARRIER: c10d.BarrierOptions,
}
"""torch's option record of each collective."""

_OTHER_NAMES: dict[Operation, dict[str, str]] = {
    REDUCE_SCATTER: {"input_tensor": "input_tensors"},
    ALL_TO_ALL: {"output_tensor": "output_tensors", "input_tensor": "input_tensors"},
    ALL_TO_ALL_SINGLE: {"output_tensor": "output", "input_tensor": "input"},
}
"""Keywords of single versions of torch, and those of our methods."""


def _only(values: Any) -> Any:
    """Returns the entry of a list of one, as torch wraps tensors and lists; ``None`` for none at all.

    Ranks that are not the root give no list, or an empty one.
    """
    if type(values) is list:
        values = values[0] if len(values) == 1 else values or None
        if type(values) is list and not values:
            return None
    return values


def _wait_for_async_tensors(values: Any) -> tuple[Any, bool]:
    """Waits for results of torch's functional collectives for which nobody waited.

    An ``AsyncCollectiveTensor`` has no memory of its own. torch's operators wait for the tensor inside it and
    take that, but Python functions call a group of ours without going through an operator.

    Returns:
        The values with the tensors inside, which share the memory that is seen through the outer ones, and
        whether there were any.
    """
    functional = sys.modules.get("torch.distributed._functional_collectives")  # slow to load, and rarely used
    return (values, False) if functional is None else _wait_for(values, functional.AsyncCollectiveTensor)


def _wait_for(values: Any, kind: type[Any]) -> tuple[Any, bool]:
    if isinstance(values, kind):
        return values.trigger_wait(), True
    if type(values) not in (list, tuple):
        return values, False
    entries = [_wait_for(value, kind) for value in values]
    if not any(found for _, found in entries):
        return values, False
    return type(values)(value for value, _ in entries), True


class TorchGroup(TorchGroupBase):
    """One of our groups in the form of torch's.

    Methods have the names, overloads and meanings of ``torch.distributed.ProcessGroup`` and ``Backend``.
    Those of the operations are described in :class:`collectives.ProcessGroup`. Option records and reductions
    may be torch's or ours. Arguments are those of
    :class:`~collectives.torch_bridge.group_base.TorchGroupBase`.
    """

    # ---- issuing -------------------------------------------------------------------------------------------

    def _issue(
        self, event: str, tensors: Any, method: Callable[..., Work], /, *args: Any, **kwargs: Any
    ) -> TorchWork:
        """Issues an operation of the inner group.

        Args:
            event: name of the profiler event, without the backend.
            tensors: tensors whose shapes it records.
            method: method of the inner group, or what calls several of them.
            *args: its arguments.
            **kwargs: its keyword arguments.
        """
        work: Work | None
        try:
            if profiling.possible() and profiling.enabled():
                work = profiling.observed(
                    f"{self._backend_name}:{event}", tensors, lambda: method(*args, **kwargs)
                )
            else:
                work = method(*args, **kwargs)
        except TypeError:  # before any communication, as arguments are checked first
            args, waited = _wait_for_async_tensors(args)
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
        try:
            self._sequence = next(self._issued)
            if self._batches:
                batch = self._batches.get(threading.get_ident())
                if batch is not None:
                    batch[0].append(work)
                    return BatchedWork(work)
            return TorchWork(work)
        except BaseException:  # of a signal handler
            work._rest()
            raise

    def _fast_collective(
        self, opts: Any, opcode: int, output: Any, input: Any, reduce_op: int | None, root: Any, lists: bool
    ) -> TorchWork | None:
        """Issues a collective by the fast path of the inner group.

        :meth:`_issue` converts torch's whole record into one of ours, which takes longer than a small
        operation.

        Args:
            opts: torch's option record.
            opcode: number of the collective, of :mod:`collectives.core.operations`.
            output: what is written, or read and written.
            input: what is only read.
            reduce_op: code of the reduction; ``None`` for one that has a factor.
            root: the root.
            lists: whether the larger operand is a list of one tensor for each rank.

        Returns:
            The Work; ``None`` with nothing done where :meth:`_issue` is to be called.
        """
        if reduce_op is None or self._batches or _profiler._is_profiler_enabled or opts.timeout > _NO_LIMIT:
            return None
        work = self.inner.fast_collective(opcode, output, input, reduce_op, root, lists, opts.asyncOp)
        if work is None:
            return None
        self._sequence = next(self._issued)
        if work is not COMPLETED:
            return TorchWork(work)
        done: DoneWork = DoneWork()
        done.outputs = () if output is None else output
        return done

    def _message(
        self, name: str, event: str, tensors: Any, peer: int | None, tag: int, method: Callable[..., Work]
    ) -> TorchWork:
        """Issues a message, by the fast path of the inner group where that takes it."""
        where = () if peer is None else (peer,)
        if dispatch_modes.possible():
            done = dispatch_modes.issue_by_operator(self, name, tensors, *where, tag)
            if done:
                return done
        elif peer is not None and not (self._batches or _profiler._is_profiler_enabled):
            work = self._fast_message(name == "send", _only(tensors), peer, tag)
            if work is not None:
                return work
        return self._issue(event, tensors, method, _only(tensors), *where, tag)

    def _fast_message(self, sends: bool, tensor: Any, peer: int, tag: int) -> TorchWork | None:
        work = self.inner.fast_message(sends, tensor, peer, tag, True)
        if work is None:
            return None
        try:
            self._sequence = next(self._issued)
            return TorchWork(work)
        except BaseException:  # of a signal handler
            work._rest()
            raise

    # ---- batches -------------------------------------------------------------------------------------------

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

    # ---- operations beside those of the table --------------------------------------------------------------

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gathers every rank's tensor on the root into one; ``output`` is not looked at on other ranks."""
        about = overload_arguments(GATHER, opts)
        if self.rank() != about["root"]:
            return self._issue("gather", input, self.inner.call, GATHER, None, input, **about)
        if output.numel() != input.numel() * self.size():
            raise ValueError(
                f"[rank {self.rank()}] gather_single on {self!r}: output has {output.numel()} elements, but "
                f"must have {input.numel()} for each of {self.size()} ranks"
            )
        outputs = dense_outputs([output])
        parts = list(outputs.stand_ins[0].view(self.size(), input.numel()).unbind())

        def gather(input: torch.Tensor) -> Work:
            work = self.inner.call(GATHER, parts, input, **about)
            return outputs.finish(work, about.get("async_op", True))

        return self._issue("gather", input, gather, input)

    gather_into_tensor = gather_single

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier on the host that names the ranks which did not come; blocks."""
        self.inner.monitored_barrier(timeout, wait_all_ranks)

    def monitoredBarrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Same as :meth:`monitored_barrier`, with the time limit in a record."""
        self.inner.monitored_barrier(None if opts is None else time_limit_of(opts), wait_all_ranks)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> TorchWork:
        """Sends a tensor to a rank."""
        return self._message("send", "send", tensors, dstRank, tag, self.inner.send)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> TorchWork:
        """Receives a tensor from a rank."""
        return self._message("recv", "recv", tensors, srcRank, tag, self.inner.recv)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        """Receives a tensor from whichever rank sends one with this tag."""
        inner = self.inner.recv_anysource
        return self._message("recv_anysource", "recvAnySource", tensors, None, tag, inner)

    recvAnysource = recv_anysource


def _collective(operation: Operation) -> Callable[..., TorchWork]:
    """Returns the method of :class:`TorchGroup` for a collective."""
    name, event, opcode = operation.methods[0], operation.collective, operation.opcode
    kind, reduces, rooted = _RECORDS[operation], operation.reduces, operation.rooted
    operands = 0 if operation is BARRIER else 1 if operation.in_place else 2
    two = operands == 2
    place = 4 if operation is ALL_TO_ALL_SINGLE else operands
    lists = Operand.EACH in {operation.output, operation.input}
    is_plain = _IS_PLAIN.get(operation)
    unwraps = operation is not ALL_TO_ALL
    shown = 0 if operation.in_place or operation is SCATTER else 1
    others = _OTHER_NAMES.get(operation, {})

    def method(self: TorchGroup, *args: Any, **named: Any) -> TorchWork:
        if named and len(args) == place and "opts" in named:
            args = (*args, named.pop("opts"))
        if len(args) == place + 1 and type(args[place]) is kind:
            if dispatch_modes.possible() and (done := dispatch_modes.issue_by_operator(self, name, *args)):
                return done
            if is_plain is None or is_plain(args):
                opts = args[place]
                output = args[0] if operands else None
                if unwraps and type(output) is list:
                    output = _only(output)
                given = args[1] if two else None
                if unwraps and type(given) is list:
                    given = _only(given)
                work = self._fast_collective(
                    opts,
                    opcode,
                    output,
                    given,
                    REDUCE_OP_CODES.get(hash(opts.reduceOp)) if reduces else 0,
                    opts.rootRank if rooted else 0,
                    lists,
                )
                if work is not None:
                    return work
        for keyword in others.keys() & named.keys():
            named[others[keyword]] = named.pop(keyword)
        tensors = (args[shown] if shown < len(args) else [*named.values()]) if operands else ()
        inner = several_tensors.method_for(self.inner, operation, args, named) or getattr(self.inner, name)
        return self._issue(event, tensors, inner, *args, **named)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"See :meth:`collectives.ProcessGroup.{name}`."
    return method


_IS_PLAIN: dict[Operation, Callable[[tuple[Any, ...]], bool]] = {
    **({ALL_REDUCE: lambda args: args[1].sparseIndices is None} if _HAS_INDICES else {}),
    ALL_REDUCE_COALESCED: lambda args: False,  # noqa: ARG005
    ALL_TO_ALL_SINGLE: lambda args: not (args[2] or args[3]),
    BARRIER: lambda args: args[0].device is None or args[0].device.type == "cpu",
}
"""Tells of torch's form of a call whether it has nothing that the fast path does not know."""


def _several(name: str, event: str) -> Callable[..., TorchWork]:
    """Returns the method of :class:`TorchGroup` for several collectives in one call."""

    def method(self: TorchGroup, *args: Any, **named: Any) -> TorchWork:
        if dispatch_modes.possible() and not named:
            given = args if len(args) == 3 else (*args, None)
            if done := dispatch_modes.issue_by_operator(self, name, *given):
                return done
        tensors = args[1] if len(args) > 1 else [*named.values()]
        return self._issue(event, tensors, getattr(self.inner, name), *args, **named)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"See :meth:`collectives.ProcessGroup.{name}`."
    return method


for _operation in OPERATIONS:
    if _operation.methods:
        _method = _collective(_operation)
        for _name in _operation.methods:
            setattr(TorchGroup, _name, _method)
for _names, _event in (
    (("allgather_coalesced",), "all_gather"),
    (("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), "all_gather"),
    (("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), "reduce_scatter"),
):
    for _name in _names:
        setattr(TorchGroup, _name, _several(_names[0], _event))
leave_uncompiled(TorchGroup)
