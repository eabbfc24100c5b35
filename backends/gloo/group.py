"""torch's own ProcessGroupGloo behind our contract: the peer to compare with, and a lane of other groups."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as torch_distributed

from collectives import ProcessGroup
from collectives.backends._shared.exit_reasons import (
    aborted_by,
    departure_of,
    limit_reason,
    refuse_broken,
    stopped_by,
)
from collectives.backends._shared.operation import Operation, Operations
from collectives.backends._shared.process_records import Liveness
from collectives.backends._shared.tensor_memory import as_bytes, byte_count, byte_splits
from collectives.backends.gloo.failures import DISCONNECTED, OWN_END, TIMED_OUT, broken_by, limit_passed
from collectives.backends.gloo.messages import Messages
from collectives.backends.gloo.options import gloo_options, option_names
from collectives.backends.gloo.reductions import REDUCTIONS, WireConversion, reduction_for
from collectives.backends.gloo.rendezvous import connect, delete_keys_of
from collectives.backends.gloo.torch_group import (
    TorchGroup,
    all_gather_single,
    all_to_all_single,
    break_connections,
)
from collectives.backends.gloo.work import CollectiveGlooWork, MessageGlooWork, begin
from collectives.core.arguments.staging import dense, dense_outputs, write
from collectives.core.capabilities import Capabilities
from collectives.core.operations import (
    ALL_GATHER,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    REDUCE_SCATTER,
    Call,
)
from collectives.core.work import CoalescedWork, CompletedWork, FinishingWork, Work
from collectives.errors import DistBackendError, DistError, GroupAbortedError
from collectives.forks import belongs_to_parent
from collectives.registry.backends import GroupOptions
from collectives.store import PrefixStore

__all__ = ["ProcessGroupGloo", "capabilities", "create", "option_names", "unavailable"]

_CAPABILITIES = Capabilities(devices=frozenset({"cpu", "cuda"}), reductions=REDUCTIONS)

_is_cuda = operator.attrgetter("is_cuda")

_PARTS_MAY_DIFFER = {
    ALL_GATHER, ALL_REDUCE_COALESCED, ALL_TO_ALL, ALL_TO_ALL_SINGLE, BARRIER, REDUCE_SCATTER
}  # fmt: skip
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


class ProcessGroupGloo(ProcessGroup):
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

    def __init__(self, options: GroupOptions) -> None:
        super().__init__(**options.membership())
        self._made_of = options
        self._breaking = threading.RLock()
        self._connect(options.store)

    def _connect(self, store: Any) -> None:
        options = replace(self._made_of, store=store, timeout=self._timeout)
        chosen = gloo_options(options)
        self._threads: int = chosen._threads
        self._contexts = max(1, len(chosen._devices))
        liveness = self._liveness = Liveness(PrefixStore("liveness", store), self._rank, self._size)
        lost_ranks = partial(liveness.lost_ranks, None)
        self._torch = TorchGroup(connect(options, chosen, self._contexts, self.where(), lost_ranks))
        self._delete_keys = partial(delete_keys_of, store, self._size, self._contexts)
        self._liveness.read_records()
        self._operations = Operations(self.flight_record)
        self._messages = Messages(self, self._rank, self._size)
        self._cause: DistError | None = None
        self._ended = False

    @property
    def capabilities(self) -> Capabilities:
        """What this group can do."""
        return _CAPABILITIES

    def name(self) -> str:
        """Returns ``"gloo"``."""
        return "gloo"

    def _settings(self) -> dict[str, int]:
        return {"gloo_num_threads": self._threads}

    # ---- collectives ---------------------------------------------------------------------------------------

    def issue(self, call: Call) -> Work:
        """Issues a collective: one without elements is done at once, one of CUDA tensors on copies."""
        if call.operation is not ALL_REDUCE_COALESCED and any(map(_is_cuda, (*call.outputs, *call.inputs))):
            return self._issue_on_host(call)
        if call.operation in _PARTS_MAY_DIFFER or call.tensor.numel():
            return super().issue(call)
        self._operation(call)
        return CompletedWork(call.outputs)

    def _issue_on_host(self, call: Call) -> Work:
        staged = dense_outputs(call.outputs, on_host=True)
        inputs = [dense(tensor).cpu() for tensor in call.inputs]
        work = self.issue(replace(call, outputs=staged.stand_ins, inputs=inputs))
        if call.writes_on(self._rank):
            return staged.finish(work, call.async_op)
        return FinishingWork(work, lambda: None, call.outputs, call.async_op)

    def _all_reduce(self, call: Call) -> Work:
        tensor, operation = call.output, self._operation(call)
        record: Any = c10d.AllreduceOptions()
        made = reduction_for(tensor.dtype, call.op, self._size)
        if not isinstance(made, WireConversion):
            record.reduceOp = made
            staged = dense_outputs([tensor])
            given = staged.stand_ins
            work = self._start(call, operation, record, lambda inner: inner.allreduce(given, record))
            return staged.finish(work, call.async_op)
        record.reduceOp = made.op
        wire = made.to_wire(dense(tensor))
        work = self._start(call, operation, record, lambda inner: inner.allreduce([wire], record))
        return FinishingWork(work, lambda: write(tensor, made.from_wire(wire)), [tensor], call.async_op)

    def _reduce(self, call: Call) -> Work:
        tensor, operation = call.output, self._operation(call)
        made = reduction_for(tensor.dtype, call.op, self._size)
        record = c10d.ReduceOptions()
        record.rootRank = call.root
        is_root = self._rank == call.root
        if isinstance(made, WireConversion):
            record.reduceOp = c10d.ReduceOp(made.op)
            wire = made.to_wire(dense(tensor))
        else:
            record.reduceOp = c10d.ReduceOp(made)
            # Gloo leaves partial results in the tensors of the other ranks.
            wire = dense(tensor) if is_root else tensor.detach().clone(memory_format=torch.contiguous_format)
        work = self._start(call, operation, record, lambda inner: inner.reduce([wire], record))

        def finish() -> None:
            if is_root:
                write(tensor, made.from_wire(wire) if isinstance(made, WireConversion) else wire)

        in_place = is_root and wire.data_ptr() == tensor.data_ptr()
        return work if in_place else FinishingWork(work, finish, [tensor], call.async_op)

    def _broadcast(self, call: Call) -> Work:
        return self._run_broadcast(call, call.output, call.root, self._operation(call))

    def _run_broadcast(self, call: Call, tensor: torch.Tensor, root: int, operation: Operation) -> Work:
        if not tensor.numel():
            return CompletedWork([tensor])
        record = c10d.BroadcastOptions()
        record.rootRank = root
        staged = dense_outputs([] if self._rank == root else [tensor])
        flat = as_bytes(staged.stand_ins[0] if staged.stand_ins else dense(tensor))
        work = self._start(call, operation, record, lambda inner: inner.broadcast([flat], record))
        return staged.finish(work, call.async_op)

    def _all_gather(self, call: Call) -> Work:
        outputs, operation = call.outputs, self._operation(call)
        if len({output.numel() for output in outputs}) > 1:
            write(outputs[self._rank], dense(call.input))
            return CoalescedWork(
                [self._run_broadcast(call, output, root, operation) for root, output in enumerate(outputs)]
            )
        if not call.input.numel():
            return CompletedWork(outputs)
        record = c10d.AllgatherOptions()
        staged = dense_outputs(outputs)
        sent = as_bytes(dense(call.input))
        parts = [as_bytes(part) for part in staged.stand_ins]
        work = self._start(call, operation, record, lambda inner: inner.allgather([parts], [sent], record))
        return staged.finish(work, call.async_op)

    def _all_gather_into_tensor(self, call: Call) -> Work:
        record = c10d.AllgatherOptions()
        staged = dense_outputs(call.outputs)
        sent, flat = as_bytes(dense(call.input)), as_bytes(staged.stand_ins[0])
        work = self._start(
            call, self._operation(call), record, lambda inner: all_gather_single(inner)(flat, sent, record)
        )
        return staged.finish(work, call.async_op)

    def _gather(self, call: Call) -> Work:
        record = c10d.GatherOptions()
        record.rootRank = call.root
        staged = dense_outputs(call.outputs)
        parts = [[as_bytes(part) for part in staged.stand_ins]] if call.outputs else []
        sent = as_bytes(dense(call.input))
        work = self._start(
            call, self._operation(call), record, lambda inner: inner.gather(parts, [sent], record)
        )
        return staged.finish(work, call.async_op)

    def _scatter(self, call: Call) -> Work:
        record = c10d.ScatterOptions()
        record.rootRank = call.root
        staged = dense_outputs(call.outputs)
        parts = [[as_bytes(dense(part)) for part in call.inputs]] if call.inputs else []
        into = as_bytes(staged.stand_ins[0])
        work = self._start(
            call, self._operation(call), record, lambda inner: inner.scatter([into], parts, record)
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
            lambda inner: all_to_all_single(inner)(received, sent, received_splits, sent_splits, record),
        )

    def _barrier(self, call: Call) -> Work:
        record = c10d.BarrierOptions()
        return self._start(call, self._operation(call), record, lambda inner: inner.barrier(record))

    # ---- point-to-point ------------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        operation = self._operations("send", [tensor], self._timeout, f"to rank {dst}, tag {tag}")
        return self._messages.send(operation, tensor, dst, tag)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        peer = "any rank" if src is None else f"rank {src}"
        operation = self._operations("recv", [tensor], self._timeout, f"from {peer}, tag {tag}")
        return self._messages.receive(operation, tensor, src, tag, self._timeout)

    def message_done(self, work: MessageGlooWork) -> None:
        """Forgets a message that is done or failed.

        Args:
            work: its Work, which calls this once.
        """
        if work.origin is self._operations:
            self._messages.message_done(work)

    # ---- start and failure ---------------------------------------------------------------------------------

    def _operation(self, call: Call) -> Operation:
        return self._operations.of(call, self._timeout)

    def check_usable(self, operation: Operation) -> Any:
        """Returns torch's group.

        Args:
            operation: what is to be done, for messages.

        Raises:
            DistBackendError: this group is broken or has ended; the class is that of the first cause.
        """
        inner = self._torch.inner
        cause = self._cause
        if cause is not None:
            refuse_broken(f"{self.where()} {operation}:", cause, self._ended)
        if inner is None:
            raise GroupAbortedError(f"{self.where()} {operation}: the group was shut down")
        return inner

    def _start(
        self, call: Call, operation: Operation, record: Any, issue: Callable[[Any], Any]
    ) -> CollectiveGlooWork:
        inner = self.check_usable(operation)
        record.timeout = max(operation.timeout, timedelta(milliseconds=1))
        started, recorded = begin(self, operation, lambda: issue(inner))
        work = CollectiveGlooWork(self, started, operation, recorded)
        if call.async_op:
            work.watch()
        return work

    def failed(self, operation: Operation, error: Exception) -> DistError:
        """Returns what to raise for an error of Gloo; the first one breaks the group.

        Args:
            operation: what failed.
            error: what Gloo raised.
        """
        broken = self._cause is not None
        found = self._error_of(operation, error)
        if not broken and self._cause is not None:
            self._messages.abort(self._cause)  # runs callbacks of users, hence without the lock
        return found

    def _error_of(self, operation: Operation, error: Exception) -> DistError:
        text = str(error)
        what = f"{self.where()} {operation}:"
        if self._cause is None:
            with self._breaking:
                if self._cause is None and operation.origin is not self._operations:
                    anew = f"{what} did not finish before the group was connected anew"
                    return GroupAbortedError(anew, **operation.about)
                if self._cause is None:
                    return self._break_by(operation, what, text)
        # Without the lock: torch's group may be going just now, which waits for the thread that calls this.
        # Without a GIL it goes on the thread that made it, at any time, with whatever that thread has locked.
        if TIMED_OUT.search(text):
            return limit_passed(what, operation)
        return stopped_by(what, self._cause)

    def _break_by(self, operation: Operation, what: str, text: str) -> DistError:
        """Returns the error for what Gloo says first; passed limits and lost connections break the group."""
        if TIMED_OUT.search(text):
            expired = limit_passed(what, operation)
            self._break(expired, limit_reason(expired))
            return expired
        if OWN_END in text:
            other = "another operation of the group passed its limit"
            return GroupAbortedError(f"{what} did not finish, because {other}", **operation.about)
        if not DISCONNECTED.search(text):
            return DistBackendError(f"{what} Gloo failed: {text}", **operation.about)
        self._break_connections()
        if (found := self._liveness.find_lost()) is not None:
            self._liveness.publish_lost(found)
        broken = broken_by(what, found, operation.about, text)
        self._break(broken)
        return broken

    def _break(self, cause: DistError, exit_reason: DistError | None = None) -> None:
        """Ends all operations between ranks, here and on the peers, and refuses later ones."""
        self._cause = cause
        if exit_reason is not None:
            self._liveness.publish_exit(exit_reason)
        self._break_connections()

    def _first_cause(self) -> DistError | None:
        return self._cause

    def _break_for(self, cause: DistError) -> None:
        with self._breaking:
            if self._cause is not None or self._ended:
                return
            if (found := departure_of(cause, self._rank)) is not None:
                self._liveness.publish_lost(found)
            self._break(cause)
        self._messages.abort(cause)

    def _break_connections(self) -> None:
        inner = self._torch.inner
        if inner is not None:
            break_connections(inner, self._rank, self._size, self._contexts)

    # ---- life ----------------------------------------------------------------------------------------------

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        self._torch.leave()

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, as far as this one sees, or whose loss is known."""
        return self._liveness.lost_ranks(self._cause)

    def refuse_in_child(self, operation: Operation) -> None:
        """Raises where this is a child that was forked after the operation was issued.

        Args:
            operation: what the child waits for.

        Raises:
            GroupAbortedError: it is.
        """
        if self._inherited:
            raise GroupAbortedError(f"{self.where()} {operation}: {belongs_to_parent('the group')}")

    def abort(self) -> None:
        """Breaks the group at once; see :meth:`collectives.ProcessGroup.abort`."""
        with self._breaking:
            if self._ended:
                return
            self._ended = True
            cause = self._cause
            if cause is None:
                cause, reason = aborted_by(self.where(), self._rank)
                self._break(cause, reason)
        self._messages.abort(cause)
        self._release()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then closes the connections."""
        self._messages.wait_until_done()
        with self._breaking:
            if self._ended:
                return
            self._ended = True
            if self._cause is None:
                self._liveness.publish_exit(None)
        self._messages.abort(GroupAbortedError(f"{self.where()} the group was shut down"))
        self._release()

    def _release(self) -> None:
        """Ends torch's group; without the lock, because callbacks of its threads may wait for it."""
        self._messages.release()
        self._torch.release()
        self._liveness.leave(self._delete_keys)
