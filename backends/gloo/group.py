"""torch's own ProcessGroupGloo behind our contract: the peer to compare with, and a lane of other groups."""

from __future__ import annotations

import operator
import re
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
    blamed,
    departure_of,
    limit_reason,
    refuse_broken,
    stopped_by,
)
from collectives.backends._shared.operation import Operation, Operations
from collectives.backends._shared.process_records import Liveness
from collectives.backends._shared.tensor_memory import as_bytes, byte_count, byte_splits
from collectives.backends.gloo.messages import Messages
from collectives.backends.gloo.options import gloo_options, option_names
from collectives.backends.gloo.reductions import REDUCTIONS, WireConversion, reduction_for
from collectives.backends.gloo.rendezvous import connect, delete_keys_of
from collectives.backends.gloo.torch_group import (
    TIMED_OUT,
    TorchGroup,
    all_gather_single,
    all_to_all_single,
    break_connections,
)
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
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistError, GroupAbortedError
from collectives.forks import belongs_to_parent
from collectives.registry.backends import GroupOptions
from collectives.store import PrefixStore

__all__ = ["ProcessGroupGloo", "capabilities", "create", "option_names", "unavailable"]

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
        lambda inner, out, given, record: all_gather_single(inner)(*out, *given, record),
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


_DISCONNECTED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|(read|write) error", re.IGNORECASE
)
"""Matches Gloo's messages about a connection that broke."""

_OWN_END = "Application timeout caused pair closure"
"""Part of Gloo's message where this rank closed the connections, because a limit passed."""


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
            lambda inner: all_to_all_single(inner)(received, sent, received_splits, sent_splits, record),
        )

    # ---- point-to-point ------------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        operation = self._operations("send", [], self._timeout, f"to rank {dst}, tag {tag}", [tensor])
        return self._messages.send(operation, tensor, dst, tag)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        peer = "any rank" if src is None else f"rank {src}"
        operation = self._operations("recv", [tensor], self._timeout, f"from {peer}, tag {tag}")
        return self._messages.receive(operation, tensor, src, tag)

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
            return _limit_passed(what, operation)
        return stopped_by(what, self._cause)

    def _break_by(self, operation: Operation, what: str, text: str) -> DistError:
        """Returns the error for what Gloo says first; passed limits and lost connections break the group."""
        if TIMED_OUT.search(text):
            expired = _limit_passed(what, operation)
            self._break(expired, limit_reason(expired))
            return expired
        if _OWN_END in text:
            other = "another operation of the group passed its limit"
            return GroupAbortedError(f"{what} did not finish, because {other}", **operation.about)
        if not _DISCONNECTED.search(text):
            return DistBackendError(f"{what} Gloo failed: {text}", **operation.about)
        self._break_connections()
        if (found := self._liveness.find_lost()) is not None:
            self._liveness.publish_lost(found)
        untold = "; Gloo does not tell which" if found is None else ""
        # without the source location in front of Gloo's message and the advice after it
        told = re.sub(r"^\[[^\]]*\]\s*", "", text).split(". ")[0].strip()
        broken = blamed(what, found, operation.about, f"{untold} ({told})")
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


def _limit_passed(what: str, operation: Operation) -> CollectiveTimeoutError:
    """Returns the error of an operation, named by ``what`` with rank and group, that passed its limit."""
    return CollectiveTimeoutError(
        f"{what} passed its time limit of {operation.timeout.total_seconds():g} s. Gloo does not tell which "
        "rank is missing; monitored_barrier() in front of it names the rank",
        **operation.about,
    )
