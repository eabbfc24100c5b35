"""ProcessGroupMPI: an MPI library moves the data, and the package's own kernels compute."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch

import collectives._native as _native
from collectives.backends._shared.arithmetic import REDUCTIONS
from collectives.backends._shared.operation import Operation, Operations
from collectives.backends._shared.process_records import Liveness
from collectives.backends._shared.tensor_memory import Part, equal_parts, part_of, split_parts
from collectives.backends.mpi.communicators import make_communicators
from collectives.backends.mpi.cuda import copy_own, why_no_cuda
from collectives.backends.mpi.dispatch import Dispatcher, FastPath
from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.libmpi import library
from collectives.backends.mpi.messages import (
    Arithmetic,
    Buffers,
    MessageExchange,
    Tags,
    arithmetic_of,
    check_length,
    cut,
)
from collectives.backends.mpi.native_exchange import MOST_RANKS, NativeExchange
from collectives.backends.mpi.unfinished import Unfinished
from collectives.backends.mpi.work import Until
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.capabilities import Capabilities
from collectives.core.native_dtypes import NATIVE_CODES
from collectives.core.operations import ALL_GATHER, BARRIER, BROADCAST, Call
from collectives.core.process_group import ProcessGroup
from collectives.core.types import nanoseconds
from collectives.core.work import CompletedWork, Work
from collectives.errors import DistError, GroupAbortedError
from collectives.forks import belongs_to_parent
from collectives.logs import Log
from collectives.registry.backends import GroupOptions
from collectives.store import PrefixStore

__all__ = ["ProcessGroupMPI", "capabilities", "create", "option_names"]

_CAPABILITIES = Capabilities(devices=frozenset({"cpu"}), reductions=REDUCTIONS, moves=frozenset(NATIVE_CODES))
_BYTE = NATIVE_CODES[torch.uint8]
_GATHERED_BYTES = 64 << 10
"""Where all ranks' tensors take no more than this together, every rank gets and reduces them all."""


_FREE_SECONDS = 10.0
"""How long the end of a group waits for MPI."""

log = Log()


class ProcessGroupMPI(ProcessGroup):
    """Collective communication over an MPI library, through mpi4py, on the CPU and, where it can, on GPUs.

    The processes are started by ``mpirun``; the ranks of a group are any of MPI's world. MPI moves the data,
    with calls that do not block, so that operations overlap and time limits hold. Every dense data type
    moves.

    **Numerics.** MPI promises neither an order of summation nor equal bits on all ranks, and rounds 16-bit
    floats, where it knows them at all, at every step. So its own reductions are not used: the kernels of this
    package reduce in rank order, in the wider accumulator, rounding once, with the results of the host
    backend. Offloading of reductions to the network is not used either.

    **CUDA tensors** are taken where the MPI is CUDA-aware (:mod:`collectives.backends.mpi.cuda`), and refused
    before anything is sent where it is not. MPI knows no streams: a call blocks the host until the current
    stream has passed what it holds, ``wait()`` blocks the host until the operation is done, and then every
    stream finds the results. What is only moved goes from device to device as MPI does it; what is reduced
    goes by the host's memory, because the kernels run there.

    **Threads.** At ``MPI_THREAD_MULTIPLE``, which mpi4py asks for, threads call MPI at the same time. At
    ``MPI_THREAD_SERIALIZED`` one at a time. Below that only the thread that started MPI may issue operations,
    and they move on only while it waits for one or asks for its state.

    **Progress.** Without a thread that waits, operations are moved on by a thread of the process, which looks
    every 30 us to 1 ms.

    **Mismatches.** Nothing is compared between ranks, unless ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: collectives
    of different kinds or sizes give wrong values, wait until their time limit, or break the group.

    **Failures.** What a rank that waits learns beyond MPI it learns from the group's store and from the
    processes of its own machine, four times a second: that a rank aborted the group, passed a time limit or
    died. Most launchers end the whole job when a process dies, before anybody can be told; others are asked
    to leave it alone (``mpirun --enable-recovery``, ``-disable-auto-cleanup``), and MPICH 5.0 often ends the
    others even then, when it touches what it shared with the dead one. ``MPI_Abort`` is never called. MPI
    cannot call off a collective: after an error it may still write into the tensors of
    operations that were in flight, whose memory therefore stays.

    Made by :func:`create`.

    Args:
        options: as :func:`create` takes them.
    """

    backend_type: ClassVar[ProcessGroup.BackendType] = ProcessGroup.BackendType.MPI
    _is_recorded = True

    def __init__(self, options: GroupOptions) -> None:
        super().__init__(**options.membership())
        if options.pg_options is not None:
            raise TypeError(f"{self.where()} the mpi backend has no options, but got {options.pg_options!r}")
        self._library = library()
        self._mpi = self._library.mpi
        refusal = why_no_cuda(self._library)
        if refusal is None:
            self._capabilities = replace(_CAPABILITIES, devices=frozenset({"cpu", "cuda"}))
        else:
            self._capabilities = replace(_CAPABILITIES, refusals={"cuda": refusal})
        self._made_of = options
        self._connect(options.store)

    def _connect(self, store: Any) -> None:
        options = replace(self._made_of, store=store, timeout=self._timeout)
        mpi = self._mpi
        store = PrefixStore("mpi", store)
        liveness = Liveness(store, self._rank, self._size)
        self._communicator, self._own_communicator = make_communicators(
            self._library, options, self.where(), liveness
        )
        largest_tag = int(self._communicator.Get_attr(mpi.TAG_UB))
        self._buffers = Buffers(mpi)
        self._tags = Tags(store, largest_tag)
        this = weakref.proxy(self)  # so that the group goes when it is let go of
        unfinished = Unfinished(self.flight_record, mpi, lambda: this._timeout)
        self._engine = Engine(
            self._library, liveness, store, self._rank, self._size, self.where(), unfinished
        )
        exchanges = itertools.count()
        messages = MessageExchange(self._own_communicator, self._buffers, largest_tag, exchanges)
        self._operations = Operations(self.flight_record)
        self._native = NativeExchange(
            self._library,
            self._own_communicator,
            self._communicator,
            self._rank,
            self._size,
            largest_tag,
            self._operations.collectives,
            self._operations.messages,
            exchanges,
            self.flight_record.of_core,
            nanoseconds(self._timeout),
            unfinished.operations,
        )
        self._dispatcher = Dispatcher(self._engine, self._native, messages, self._rank, self._size)
        fast_path = FastPath(self._native, self._engine, self._tags, self._size)
        self.fast_collective = fast_path.collective  # type: ignore[method-assign]  # a call less
        self.fast_message = fast_path.message  # type: ignore[method-assign]

    @property
    def capabilities(self) -> Capabilities:
        """What this group can do."""
        return self._capabilities

    def name(self) -> str:
        """Returns ``"mpi"``."""
        return "mpi"

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of all future operations that name none."""
        super().set_timeout(timeout)
        self._native.set_timeout(nanoseconds(self._timeout))

    # ---- collectives ---------------------------------------------------------------------------------------

    def _all_reduce(self, call: Call) -> Work:
        return self._reduce_all(call, None)

    def _reduce(self, call: Call) -> Work:
        return self._reduce_all(call, call.root)

    def _reduce_all(self, call: Call, root: int | None) -> Work:
        """Reduces a tensor to all ranks, or to the root."""
        operation, tensor = self._operation(call), call.output
        if not tensor.numel():
            self._engine.check_usable(operation)
            return CompletedWork([tensor])
        writes = call.writes_on(self._rank)
        staged = dense_outputs([tensor] if writes else [], on_host=True)
        data = staged.stand_ins[0] if writes else dense(tensor).cpu()
        whole, arithmetic = part_of(data), arithmetic_of(tensor.dtype, call.op, self._size)
        kind = call.operation.opcode
        if self._native.serves(kind, whole.nbytes, arithmetic.item):
            return self._dispatcher.by_core(
                operation,
                call.async_op,
                staged.last_step,
                (data,),
                whole.nbytes,
                opcode=kind,
                data_ptr=whole.address,
                count=whole.nbytes // arithmetic.item,
                dtype_code=arithmetic.dtype,
                op_code=arithmetic.op,
                factor=arithmetic.factor,
                root=root or 0,
            )
        if self._size > MOST_RANKS and whole.nbytes * self._size <= _GATHERED_BYTES:
            return self._gather_and_reduce(operation, staged, data, arithmetic, root, call.async_op)
        parts = cut(whole, arithmetic.item, self._size)
        own = parts[self._rank]
        keep = [data]
        if not writes:
            keep.append(torch.empty(own.nbytes, dtype=torch.uint8))
        target = own.address if writes else keep[1].data_ptr()
        outputs = parts if writes else ()
        return self._dispatcher.reduce(
            operation,
            parts,
            target,
            arithmetic,
            call.async_op,
            staged.last_step,
            keep,
            outputs=outputs,
            root=root,
        )

    def _gather_and_reduce(
        self,
        operation: Operation,
        staged: dense_outputs,
        data: torch.Tensor,
        arithmetic: Arithmetic,
        root: int | None,
        asynchronous: bool,
    ) -> Work:
        """Reduces small tensors: all ranks, or the root, get them all."""
        whole = part_of(data)
        gets_all = root is None or root == self._rank
        memory = torch.empty(whole.nbytes * self._size if gets_all else 0, dtype=torch.uint8)
        begin = memory.data_ptr()
        own = self._buffers(*whole)
        place = self._buffers.parts(begin, whole.nbytes, self._size) if gets_all else None

        def issue() -> list[Any]:
            if root is None:
                return [self._communicator.Iallgather(own, place)]
            return [self._communicator.Igather(own, place, root)]

        def finish() -> None:
            if gets_all:
                sources = [begin + rank * whole.nbytes for rank in range(self._size)]
                count = whole.nbytes // arithmetic.item
                _native.reduce(
                    whole.address, sources, count, arithmetic.dtype, arithmetic.op, arithmetic.factor
                )
            if staged.last_step is not None:
                staged.last_step()

        return self._dispatcher.by_calls(operation, issue, asynchronous, finish, (data, memory))

    def _broadcast(self, call: Call) -> Work:
        operation = self._operation(call)
        staged = dense_outputs(call.outputs if call.writes_on(self._rank) else [])
        data = staged.stand_ins[0] if staged.stand_ins else dense(call.output)
        whole = part_of(data)
        if self._native.serves(BROADCAST.opcode, whole.nbytes, 1):
            return self._dispatcher.by_core(
                operation,
                call.async_op,
                staged.last_step,
                (data,),
                whole.nbytes,
                opcode=BROADCAST.opcode,
                data_ptr=whole.address,
                count=whole.nbytes,
                dtype_code=_BYTE,
                root=call.root,
            )
        return self._dispatcher.by_calls(
            operation,
            lambda: [self._communicator.Ibcast(self._buffers(*whole), call.root)],
            call.async_op,
            staged.last_step,
            (data,),
            whole.nbytes,
        )

    def _all_gather(self, call: Call) -> Work:
        sent = [dense(call.input)] * self._size
        return self._dispatcher.move(self._operation(call), sent, call.outputs, call.async_op)

    def _all_gather_into_tensor(self, call: Call) -> Work:
        operation = self._operation(call)
        staged = dense_outputs(call.outputs)
        source, target = dense(call.input), staged.stand_ins[0]
        own, whole = part_of(source), part_of(target)
        if target.is_cuda:
            place = Part(whole.address + self._rank * own.nbytes, own.nbytes)
            copy_own(target, place, source, own)
            own = place
        if self._native.serves(ALL_GATHER.opcode, own.nbytes * self._size, 1):
            return self._dispatcher.by_core(
                operation,
                call.async_op,
                staged.last_step,
                (source, target),
                whole.nbytes,
                opcode=ALL_GATHER.opcode,
                input_ptr=own.address,
                count=own.nbytes,
                dtype_code=_BYTE,
                outputs=[(whole.address + rank * own.nbytes, own.nbytes) for rank in range(self._size)],
            )
        in_place = own.address == whole.address + self._rank * own.nbytes
        given = self._mpi.IN_PLACE if in_place else self._buffers(*own)
        places = self._buffers.parts(whole.address, own.nbytes, self._size)
        return self._dispatcher.by_calls(
            operation,
            lambda: [self._communicator.Iallgather(given, places)],
            call.async_op,
            staged.last_step,
            (source, target),
            whole.nbytes,
        )

    def _gather(self, call: Call) -> Work:
        sent: list[torch.Tensor | None] = [None] * self._size
        sent[call.root] = dense(call.input)
        return self._dispatcher.move(self._operation(call), sent, call.outputs or None, call.async_op)

    def _scatter(self, call: Call) -> Work:
        sent = [dense(part) for part in call.inputs] or None
        outputs: list[torch.Tensor | None] = [None] * self._size
        outputs[call.root] = call.output
        return self._dispatcher.move(self._operation(call), sent, outputs, call.async_op)

    def _reduce_scatter(self, call: Call) -> Work:
        sources = [dense(part).cpu() for part in call.inputs]
        return self._reduce_parts(call, sources, [part_of(part) for part in sources])

    def _reduce_scatter_tensor(self, call: Call) -> Work:
        source = dense(call.input).cpu()
        return self._reduce_parts(call, [source], equal_parts(source, self._size))

    def _reduce_parts(self, call: Call, sources: list[torch.Tensor], parts: list[Part]) -> Work:
        operation = self._operation(call)
        staged = dense_outputs(call.outputs, on_host=True)
        target = staged.stand_ins[0]
        arithmetic = arithmetic_of(call.output.dtype, call.op, self._size)
        keep = [*sources, target]
        return self._dispatcher.reduce(
            operation, parts, target.data_ptr(), arithmetic, call.async_op, staged.last_step, keep
        )

    def _all_to_all(self, call: Call) -> Work:
        sent = [dense(part) for part in call.inputs]
        return self._dispatcher.move(self._operation(call), sent, call.outputs, call.async_op)

    def _all_to_all_single(self, call: Call) -> Work:
        operation = self._operation(call)
        staged = dense_outputs(call.outputs)
        source, target = dense(call.input), staged.stand_ins[0]
        sent = split_parts(source, call.input_splits or ())
        received = split_parts(target, call.output_splits or ())
        if target.is_cuda:
            copy_own(target, received[self._rank], source, sent[self._rank])
            sent[self._rank] = received[self._rank]
        return self._dispatcher.move_parts(
            operation, sent, received, call.async_op, staged.last_step, (source, target)
        )

    def _barrier(self, call: Call) -> Work:
        operation = self._operation(call)
        earlier = [work for work in self._engine.earlier() if not work.point_to_point]
        after_these = Until(lambda: all(work.done for work in earlier))
        return self._dispatcher.by_core(operation, call.async_op, then=after_these, opcode=BARRIER.opcode)

    # ---- point-to-point ------------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        operation = self._operations("send", [], self._timeout, f"to rank {dst}, tag {tag}", shown=[tensor])
        self._engine.check_usable(operation)
        data = dense(tensor)
        message, own_tag = self._buffers(*part_of(data)), self._tags.of(tag)
        return self._dispatcher.by_calls(
            operation,
            lambda: [self._communicator.Isend(message, dst, own_tag)],
            True,
            None,
            (data,),
            point_to_point=True,
        )

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        peer = "any rank" if src is None else f"rank {src}"
        operation = self._operations("recv", [tensor], self._timeout, f"from {peer}, tag {tag}")
        self._engine.check_usable(operation)
        staged = dense_outputs([tensor])
        data, status = staged.stand_ins[0], self._mpi.Status()
        place, own_tag = part_of(data), self._tags.of(tag)
        message, source = self._buffers(*place), self._mpi.ANY_SOURCE if src is None else src

        def check() -> None:
            check_length(self.where(), operation, int(status.Get_elements(self._mpi.BYTE)), place.nbytes)
            if staged.last_step is not None:
                staged.last_step()

        return self._dispatcher.by_calls(
            operation,
            lambda: [self._communicator.Irecv(message, source, own_tag)],
            True,
            check,
            (data,),
            status=status,
            point_to_point=True,
        )

    # ---- issue ---------------------------------------------------------------------------------------------

    def _operation(self, call: Call) -> Operation:
        return self._operations.of(call, self._timeout)

    # ---- life ----------------------------------------------------------------------------------------------

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        self._engine.leave(GroupAbortedError(f"{self.where()} {belongs_to_parent('the group')}"))

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, as far as this one sees, or whose loss is known."""
        return self._engine.lost_ranks()

    def _first_cause(self) -> DistError | None:
        return self._engine.cause

    def _break_for(self, cause: DistError) -> None:
        self._engine.break_for(cause)

    def abort(self) -> None:
        """Breaks the group at once; see :meth:`collectives.ProcessGroup.abort`."""
        self._engine.abort()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees the communicators.

        MPI may wait there for ranks that have not called this; after ten seconds the group goes on without.
        """
        if not self._engine.shutdown():
            return
        communicators = self._communicator, self._own_communicator

        def free() -> None:
            with self._engine.lock:
                for communicator in communicators:
                    communicator.Free()

        try:
            self._library.within(_FREE_SECONDS, free)
        except TimeoutError:
            log.of(self).warning(
                "MPI_Comm_free has not returned within %g s: a rank that has not shut the group down, or was "
                "stopped, keeps it; this rank goes on, and leaves the communicators behind",
                _FREE_SECONDS,
            )


def capabilities() -> Capabilities:
    """Returns what groups of this backend can do."""
    return _CAPABILITIES


def option_names() -> tuple[str, ...]:
    """Returns the names of the backend's own options: none."""
    return ()


def create(options: GroupOptions) -> ProcessGroupMPI:
    """Returns a new group; called by all its ranks, blocks until they have come.

    Args:
        options: ``pg_options`` must be ``None``.

    Raises:
        CollectiveTimeoutError: ranks did not come in time; names them.
        DistBackendError: there is no MPI, the program was not started by ``mpirun``, or the ranks are not of
            one MPI job.
    """
    return ProcessGroupMPI(options)
