"""torch's own ProcessGroupGloo behind our contract: the peer to compare with, and a lane of other groups."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as torch_distributed

from collectives import ProcessGroup
from collectives.backends._shared.health import MonitoredGroup
from collectives.backends._shared.operation import Operation, Operations
from collectives.backends._shared.tensor_memory import as_bytes, byte_count, byte_splits
from collectives.backends.gloo.connections import Connections
from collectives.backends.gloo.reductions import REDUCTIONS, WireConversion, reduction_for
from collectives.backends.gloo.work import CollectiveGlooWork, begin
from collectives.core.arguments.staging import dense, dense_outputs, write
from collectives.core.capabilities import Capabilities
from collectives.core.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE_SCATTER,
    SCATTER,
    Call,
)
from collectives.core.operations import Operation as CollectiveOperation
from collectives.core.work import CoalescedWork, CompletedWork, FinishingWork, Work
from collectives.registry.backends import GroupOptions

_CAPABILITIES = Capabilities(devices=frozenset({"cpu", "cuda"}), reductions=REDUCTIONS)

_is_cuda = operator.attrgetter("is_cuda")

_MOVES: dict[CollectiveOperation, tuple[Any, Callable[..., Any]]] = {
    BROADCAST: (c10d.BroadcastOptions, lambda inner, out, _, record: inner.broadcast(out, record)),
    ALL_GATHER: (
        c10d.AllgatherOptions,
        lambda inner, out, given, record: inner.allgather([out], given, record),
    ),
    ALL_GATHER_INTO_TENSOR: (
        c10d.AllgatherOptions,
        lambda inner, out, given, record: _either(inner, "all_gather_single", "_allgather_base")(
            *out, *given, record
        ),
    ),
    GATHER: (
        c10d.GatherOptions,
        lambda inner, out, given, record: inner.gather([out] if out else [], given, record),
    ),
    SCATTER: (
        c10d.ScatterOptions,
        lambda inner, out, given, record: inner.scatter(out, [given] if given else [], record),
    ),
    BARRIER: (c10d.BarrierOptions, lambda inner, _out, _given, record: inner.barrier(record)),
}
"""The collectives that only move bytes: torch's record of options, and how its group is called."""

_PARTS_MAY_DIFFER = {ALL_REDUCE_COALESCED, ALL_TO_ALL, ALL_TO_ALL_SINGLE, BARRIER, REDUCE_SCATTER}
"""Collectives of which a rank cannot tell by one tensor whether there is anything to move."""


def unavailable() -> str | None:
    """Returns why Gloo cannot be used here, or ``None``."""
    if not torch_distributed.is_available() or not torch_distributed.is_gloo_available():
        return "this build of torch has no Gloo; install one that has, such as the wheels of PyPI"
    return None


def capabilities() -> Capabilities:
    """Returns what groups can do."""
    return _CAPABILITIES


def create(options: GroupOptions) -> ProcessGroupGloo:
    """Returns a new group; called by all its ranks, blocks until they are connected.

    Connections go over the network interfaces named in ``COLLECTIVES_SOCKET_IFNAME`` or else
    ``GLOO_SOCKET_IFNAME`` (as many on every rank; several are separated by commas and used in turn), or
    without those over the one that the host name resolves to.

    With ``TORCH_GLOO_LAZY_INIT=1`` on every rank, two ranks are connected when they first need it. Gloo then
    waits for the other one for as long as the group's time limit, whatever that of the operation is, and does
    not notice when a rank goes that it is not connected to.

    Args:
        options: ``pg_options`` may be a ``torch.distributed.ProcessGroupGloo._Options`` with the number of
            threads and the devices, or a dict of its fields ``_threads`` and ``_devices``.

    Raises:
        TypeError: ``pg_options`` are something else.
        DistBackendError: the ranks could not be connected, or differ in the number of interfaces.
    """
    return ProcessGroupGloo(options)


class ProcessGroupGloo(MonitoredGroup):
    """A group over torch's Gloo: TCP connections between all ranks, on one machine too.

    What Gloo lacks is made from what it has: every data type can be moved (as bytes) and reduced (in a wider
    type), parts may be uneven, a rank may send to itself, :meth:`abort` releases those who wait, and a rank
    that finds another gone lets all others know.

    **Numerics.** Gloo cannot promise the rules of this package. The result is the same on all ranks, but the
    order of a sum depends on the rank layout, on the size and on an element's position; float16 and bfloat16
    are rounded at every step; NaN may get lost in MIN and MAX, which do not order zeros of both signs; AVG
    overflows where the sum does. float8 and PREMUL_SUM are computed in float32
    and rounded once.

    **CUDA tensors** travel as copies on the host: a call waits for the device before it returns, and
    ``wait()`` for the operation.

    **Mismatches.** Gloo compares nothing between ranks. Different reductions or data types of equal size give
    wrong values without an error; a message longer than the tensor that receives it ends the process.

    **Order.** Gloo runs up to two collectives of a group at the same time, so that a later one may be done
    first.

    **To itself.** A message to the own rank is matched by a receive that names this rank, or by one from any
    rank issued after it.

    Made by :func:`create`.

    Args:
        options: as :func:`create` takes them.
    """

    backend_type: ClassVar[ProcessGroup.BackendType] = ProcessGroup.BackendType.GLOO
    _is_recorded = True

    _health: Connections

    def __init__(self, options: GroupOptions) -> None:
        super().__init__(**options.membership())
        self._made_of = options
        self._connect(options.store)

    def _connect(self, store: Any) -> None:
        options = replace(self._made_of, store=store, timeout=self._timeout)
        self._health = Connections(options, self.where())
        self._operations = Operations(self.flight_record)

    @property
    def capabilities(self) -> Capabilities:
        """What this group can do."""
        return _CAPABILITIES

    def name(self) -> str:
        """Returns ``"gloo"``."""
        return "gloo"

    def _settings(self) -> dict[str, int]:
        return {"gloo_num_threads": self._health.threads}

    # ---- collectives ---------------------------------------------------------------------------------------

    def issue(self, call: Call) -> Work:
        """Issues a collective: one without elements is done at once, one of CUDA tensors on copies."""
        operation, outputs = call.operation, call.outputs
        if operation is not ALL_REDUCE_COALESCED and any(map(_is_cuda, (*outputs, *call.inputs))):
            return self._issue_on_host(call)
        if operation is ALL_GATHER and len({output.numel() for output in outputs}) > 1:
            return self._all_gather_uneven(call)
        if operation not in _PARTS_MAY_DIFFER and not call.tensor.numel():
            self._operation(call)
            return CompletedWork(outputs)
        return self._move(call) if operation in _MOVES else super().issue(call)

    def _issue_on_host(self, call: Call) -> Work:
        staged = dense_outputs(call.outputs, on_host=True)
        inputs = [dense(tensor).cpu() for tensor in call.inputs]
        work = self.issue(replace(call, outputs=staged.stand_ins, inputs=inputs))
        if call.writes_on(self._rank):
            return staged.finish(work, call.async_op)
        return FinishingWork(work, lambda: None, call.outputs, call.async_op)

    def _all_reduce(self, call: Call) -> Work:
        return self._reduce_with(call, c10d.AllreduceOptions(), lambda inner: inner.allreduce)

    def _reduce(self, call: Call) -> Work:
        record = c10d.ReduceOptions()
        record.rootRank = call.root
        return self._reduce_with(call, record, lambda inner: inner.reduce)

    def _reduce_with(self, call: Call, record: Any, method: Callable[[Any], Any]) -> Work:
        tensor, operation = call.output, self._operation(call)
        writes = call.writes_on(self._rank)
        made = reduction_for(tensor.dtype, call.op, self._size)
        staged = dense_outputs([])
        if isinstance(made, WireConversion):
            record.reduceOp = c10d.ReduceOp(made.op)
            wire = made.to_wire(dense(tensor))
        else:
            record.reduceOp = c10d.ReduceOp(made)
            if writes:
                staged = dense_outputs([tensor])
                wire = staged.stand_ins[0]
            else:  # Gloo leaves partial results in the tensors of the other ranks
                wire = tensor.detach().clone(memory_format=torch.contiguous_format)
        work = self._start(call, operation, record, lambda inner: method(inner)([wire], record))
        if not writes or not isinstance(made, WireConversion):
            return staged.finish(work, call.async_op)
        from_wire = made.from_wire
        return FinishingWork(work, lambda: write(tensor, from_wire(wire)), [tensor], call.async_op)

    def _all_gather_uneven(self, call: Call) -> Work:
        operation = self._operation(call)
        write(call.outputs[self._rank], dense(call.input))
        return CoalescedWork(
            [
                self._move(replace(call.as_(BROADCAST, [output]), root=root), operation)
                for root, output in enumerate(call.outputs)
                if output.numel()
            ]
        )

    def _move(self, call: Call, operation: Operation | None = None) -> Work:
        """Carries out a collective of which Gloo need know no more than the bytes."""
        options, issue = _MOVES[call.operation]
        record: Any = options()
        if call.operation.rooted:
            record.rootRank = call.root
        staged = dense_outputs(call.outputs if call.writes_on(self._rank) else [])
        written = [as_bytes(output) for output in staged.stand_ins or map(dense, call.outputs)]
        read = [as_bytes(dense(tensor)) for tensor in call.inputs]
        work = self._start(
            call,
            operation or self._operation(call),
            record,
            lambda inner: issue(inner, written, read, record),
        )
        return staged.finish(work, call.async_op)

    def _all_to_all(self, call: Call) -> Work:
        sent = torch.cat([as_bytes(dense(part)) for part in call.inputs])
        sizes = [byte_count(output) for output in call.outputs]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        work = self._exchange(call, received, sent, sizes, [byte_count(part) for part in call.inputs])
        staged = dense_outputs(call.outputs)

        def unpack() -> None:
            for part, stand_in in zip(torch.split(received, sizes), staged.stand_ins, strict=True):
                as_bytes(stand_in).copy_(part)

        return staged.finish(FinishingWork(work, unpack, call.outputs, call.async_op), call.async_op)

    def _all_to_all_single(self, call: Call) -> Work:
        staged = dense_outputs(call.outputs)
        received, sent = as_bytes(staged.stand_ins[0]), as_bytes(dense(call.input))
        sizes = byte_splits(call.output, call.output_splits or ())
        work = self._exchange(call, received, sent, sizes, byte_splits(call.input, call.input_splits or ()))
        return staged.finish(work, call.async_op, call.outputs)

    def _exchange(
        self,
        call: Call,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: list[int],
        sent_splits: list[int],
    ) -> Work:
        record = c10d.AllToAllOptions()
        return self._start(
            call,
            self._operation(call),
            record,
            lambda inner: _either(inner, "all_to_all_single", "alltoall_base")(
                received, sent, received_splits, sent_splits, record
            ),
        )

    # ---- point-to-point ------------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        operation = self._operations("send", [], self._timeout, f"to rank {dst}, tag {tag}", [tensor])
        return self._health.messages.send(operation, tensor, dst, tag)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        peer = "any rank" if src is None else f"rank {src}"
        operation = self._operations("recv", [tensor], self._timeout, f"from {peer}, tag {tag}")
        return self._health.messages.receive(operation, tensor, src, tag)

    # ---- start and end -------------------------------------------------------------------------------------

    def _operation(self, call: Call) -> Operation:
        return self._operations.of(call, self._timeout)

    def _start(
        self, call: Call, operation: Operation, record: Any, issue: Callable[[Any], Any]
    ) -> CollectiveGlooWork:
        connections = self._health
        inner = connections.check_usable(operation)
        record.timeout = max(operation.timeout, timedelta(milliseconds=1))
        started, recorded = begin(connections, operation, lambda: issue(inner))
        work = CollectiveGlooWork(connections, started, operation, recorded)
        if call.async_op:
            work.watch()
        return work

    def abort(self) -> None:
        """Breaks the group at once; see :meth:`collectives.ProcessGroup.abort`."""
        if self._health.abort():
            self._health.release()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then closes the connections."""
        self._health.shutdown()


def _either(inner: Any, new: str, old: str) -> Callable[..., Any]:
    """Returns a method under the name of newer releases of torch, or of older ones."""
    found: Callable[..., Any] = getattr(inner, new, None) or getattr(inner, old)
    return found
