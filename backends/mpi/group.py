"""ProcessGroupMPI: an MPI library moves the data, and the package's own kernels compute.

The C++ core (``backends/native/mpi``) makes every collective of messages between the ranks. It calls the MPI
library that mpi4py has loaded, by address: what MPI takes from C costs a few hundred nanoseconds a message,
from Python some microseconds. A synchronous call tests its messages for at most two milliseconds in the core.
What is not over by then, and every asynchronous call, becomes a Work that the engine drives, with its time
limits and its look at other ranks.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch

import collectives._native as _native
from collectives.backends._shared.arithmetic import REDUCTIONS
from collectives.backends._shared.dense_call import DenseCall
from collectives.backends._shared.health import MonitoredGroup
from collectives.backends._shared.operation import Operation, Operations
from collectives.backends._shared.tensor_memory import Part, as_bytes, byte_count, part_of
from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.libmpi import library
from collectives.backends.mpi.rendezvous import make_communicators
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.capabilities import Capabilities
from collectives.core.native_dtypes import NATIVE_CODES
from collectives.core.operations import (
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_REDUCE_INTO_TENSOR,
    BARRIER,
    Call,
)
from collectives.core.process_group import ProcessGroup
from collectives.core.profiling import profiler
from collectives.core.types import nanoseconds
from collectives.core.work import COMPLETED, CoalescedWork, FinishingWork, Work
from collectives.errors import DistError
from collectives.logs import Log
from collectives.registry.backends import GroupOptions
from collectives.store import PrefixStore
from collectives.store.joining.agreement import exchange

_CAPABILITIES = Capabilities(devices=frozenset({"cpu"}), reductions=REDUCTIONS, moves=frozenset(NATIVE_CODES))

_SPINS = 2000
"""Tests in a row of a synchronous call in the core, which yields for two milliseconds after them."""

_SPINS_OVERSUBSCRIBED = 20

_FUNCTIONS = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Testall", "MPI_Get_count", "MPI_Cancel")

_MOST = 2**31 - 1
"""The largest number of elements that every MPI library takes; those before MPI 4 count in C's int."""

_BLOCK_BYTES = 2**30

_FREE_SECONDS = 10.0
"""How long the end of a group waits for MPI."""

log = Log()

for _type in (torch.Tensor, torch.nn.Parameter):
    _native.register_tensor_type(_type)


@functools.cache
def _type_of(mpi: Any, nbytes: int) -> Any:
    """Returns a data type of which one element is so many bytes; never freed, because operations may last."""
    blocks, rest = divmod(nbytes, _BLOCK_BYTES)
    block = mpi.BYTE.Create_contiguous(_BLOCK_BYTES)
    whole = block.Create_contiguous(blocks)
    made = mpi.Datatype.Create_struct([1, rest], [0, blocks * _BLOCK_BYTES], [whole, mpi.BYTE]).Commit()
    whole.Free()
    block.Free()
    return made


def _synchronize_streams(tensors: Iterable[Any]) -> None:
    """Blocks until the current streams of CUDA tensors have passed what they hold; others are left out.

    MPI knows no streams: what it is given must be in memory.
    """
    for device in {
        tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    }:
        torch.cuda.current_stream(device).synchronize()


def _copy_own(target: torch.Tensor, place: Part, source: torch.Tensor, part: Part) -> None:
    """Copies a part of one dense CUDA tensor to a part of another, on the current stream."""
    if part.nbytes and place.address != part.address:
        whole, given = as_bytes(target), as_bytes(source)
        begin, first = place.address - target.data_ptr(), part.address - source.data_ptr()
        whole[begin : begin + part.nbytes].copy_(given[first : first + part.nbytes])


def _on_device(
    outputs: Iterable[torch.Tensor], after: Callable[[], None] | None
) -> Callable[[], None] | None:
    """Returns a last step after which CUDA outputs are in memory, whatever thread and stream it runs on."""
    device = next((tensor.device for tensor in outputs if tensor.is_cuda), None)
    if after is None or device is None:
        return after

    def step() -> None:
        with torch.cuda.device(device):
            after()
            torch.cuda.current_stream(device).synchronize()

    return step


class _Tags:
    """The tags of a group's messages: any number below 2^31, whatever the library's largest tag.

    Tags in the lower half of the library's range stand for themselves. For every other one the group's store
    keeps a number of the upper half, given out in the order in which such tags are first used.

    Attributes:
        own: tags below this one stand for themselves.

    Args:
        store: the group's store.
        largest: the library's largest tag (``MPI_TAG_UB``).
    """

    def __init__(self, store: Any, largest: int) -> None:
        self._store = store
        self.own = largest + 1 if largest >= 2**31 - 1 else largest // 2
        self._known: dict[int, int] = {}

    def of(self, tag: int) -> int:
        """Returns MPI's tag for a user's; asks the store where a large one is used for the first time."""
        if tag < self.own:
            return tag
        found = self._known.get(tag)
        if found is None:
            key = f"tag/{tag}"
            if self._store.add(f"{key}/users", 1) == 1:
                self._store.set(key, str(self.own + self._store.add("tags", 1)))
            found = self._known[tag] = int(self._store.get(key))
        return found


class ProcessGroupMPI(MonitoredGroup):
    """Collective communication over an MPI library, through mpi4py, on the CPU and, where it can, on GPUs.

    The processes are started by ``mpirun``; the ranks of a group are any of MPI's world. MPI moves the data,
    with messages that do not block, so that operations overlap and time limits hold. Every dense data type
    moves.

    **Numerics.** MPI promises neither an order of summation nor equal bits on all ranks, and rounds 16-bit
    floats, where it knows them at all, at every step. So its own reductions are not used: the kernels of this
    package reduce in rank order, in the wider accumulator, rounding once, with the results of the host
    backend. Offloading of reductions to the network is not used either.

    **CUDA tensors** are taken where the MPI is CUDA-aware, as it says or ``COLLECTIVES_MPI_CUDA`` does, and
    refused before anything is sent where it is not. MPI knows no streams: a call blocks the host until the
    current stream has passed what it holds, ``wait()`` blocks the host until the operation is done, and then
    every stream finds the results. What is only moved goes from device to device as MPI does it; what is
    reduced goes by the host's memory, because the kernels run there.

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
    _health: Engine

    def __init__(self, options: GroupOptions) -> None:
        super().__init__(**options.membership())
        if options.pg_options is not None:
            raise TypeError(f"{self.where()} the mpi backend has no options, but got {options.pg_options!r}")
        self._library = library()
        self._mpi = self._library.mpi
        refusal = self._library.why_no_cuda()
        if refusal is None:
            self._capabilities = replace(_CAPABILITIES, devices=frozenset({"cpu", "cuda"}))
        else:
            self._capabilities = replace(_CAPABILITIES, refusals={"cuda": refusal})
        self._made_of = options
        self._connect(options.store)

    def _connect(self, store: Any) -> None:
        options = replace(self._made_of, store=store, timeout=self._timeout)
        mpi = self._mpi
        store = self._shared = PrefixStore("mpi", store)
        this = weakref.proxy(self)  # so that the group goes when it is let go of
        health = Engine(
            self._library,
            store,
            self._rank,
            self._size,
            self.where(),
            self.flight_record,
            lambda: this._timeout,
        )
        self._communicator, self._own_communicator = make_communicators(
            self._library, options, self.where(), health
        )
        self._health = health
        largest_tag = int(self._communicator.Get_attr(mpi.TAG_UB))
        self._tags = _Tags(store, largest_tag)
        self._operations = Operations(self.flight_record)
        # The extension was linked with the library, so that its own search for names finds the same one.
        functions = ctypes.CDLL(mpi.__file__)
        self._core = _native.MpiGroup(
            tuple(ctypes.cast(functions[name], ctypes.c_void_p).value or 0 for name in _FUNCTIONS),
            (mpi._sizeof(mpi.Request), mpi._sizeof(mpi.Status)),
            mpi.BYTE.handle,
            self._own_communicator.handle,
            self._communicator.handle,
            self._rank,
            self._size,
            largest_tag,
            self._operations.collectives,
            self._operations.messages,
            _SPINS_OVERSUBSCRIBED if self._library.oversubscribed else _SPINS,
            self.flight_record.of_core,
            nanoseconds(self._timeout),
            self._health.unfinished,
        )

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
        self._core.set_timeout(nanoseconds(self._timeout))

    # ---- collectives ---------------------------------------------------------------------------------------

    def fast_collective(
        self,
        opcode: int,
        output: Any = None,
        input: Any = None,
        reduce_op: int = 0,
        root: Any = 0,
        list_form: bool = False,
        async_op: bool = False,
    ) -> Work | None:
        """Runs a synchronous collective on dense tensors while no other operation is in flight."""
        engine = self._health
        if (
            async_op
            or engine.over
            or not engine.idle
            or profiler._is_profiler_enabled
            or not self._library.concurrent  # the core has not the engine's lock
        ):
            return None
        try:
            done = self._core.fast_collective(opcode, output, input, reduce_op, root, list_form)
            if done is False:
                return None
            if done is not True:
                engine.carry_on(done)
        except BaseException:
            engine.watch()  # a signal's handler may have raised: the messages are under way
            raise
        return COMPLETED

    def issue(self, call: Call) -> Work:
        """Begins a collective in the core, and waits for it where it is synchronous."""
        operation = call.operation
        if operation in {ALL_REDUCE_COALESCED, ALL_REDUCE_INTO_TENSOR}:
            return super().issue(call)
        described = self._operations.of(call, self._timeout)
        earlier = self._health.earlier() if operation is BARRIER else []
        on_host = operation.reduces  # where the kernels run
        dense_call = DenseCall(call, self._rank, self._size, on_host)
        targets, sources, sent = dense_call.targets, dense_call.sources, dense_call.sent
        own = [tensors[self._rank % len(tensors)] for tensors in (targets, sources) if tensors]
        if len(own) == 2 and own[1].is_cuda:  # whose own part the core cannot copy
            target, given = own
            place = dense_call.received[self._rank] if dense_call.received else part_of(target)
            _copy_own(target, place, given, sent[self._rank] if sent else part_of(given))
            if sent:
                sent[self._rank] = place
            else:
                dense_call.input_ptr = place.address
        keep = dense_call.tensors
        _synchronize_streams(keep)
        return self._health.issue(
            described,
            lambda: self._core.issue(*dense_call.arguments()),
            call.async_op,
            keep,
            _on_device(call.outputs, dense_call.staged.last_step),
            sum(map(byte_count, keep)),
            [work for work in earlier if not work.operation.is_message],
        )

    def _all_reduce_coalesced(self, call: Call) -> Work:
        """As on every backend, but copies are back in memory for every stream when it is done."""
        separate = dense_outputs(call.outputs, separate=True)
        works = [self.issue(call.as_(ALL_REDUCE, [tensor])) for tensor in separate.stand_ins]
        last_step = _on_device(call.outputs, separate.last_step)
        work = CoalescedWork(works)
        return work if last_step is None else FinishingWork(work, last_step, call.outputs, call.async_op)

    # ---- point-to-point ------------------------------------------------------------------------------------

    def fast_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, async_op: bool = False
    ) -> Work | None:
        """Moves a dense tensor to or from a rank, synchronously."""
        engine = self._health
        if (
            async_op
            or profiler._is_profiler_enabled
            or engine.over
            or not self._library.concurrent
            or type(peer) is not int
            or type(tag) is not int
            or not (0 <= peer < self._size and 0 <= tag < self._tags.own)
        ):
            return None
        try:
            done = self._core.fast_message(sends, tensor, peer, tag)
            if done is False:
                return None
            if done is not True:
                engine.carry_on(done)
        except BaseException:
            engine.watch()  # as above
            raise
        return COMPLETED

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        operation = self._operations("send", [], self._timeout, f"to rank {dst}, tag {tag}", shown=[tensor])
        return self._message(operation, dense(tensor), dst, tag)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        peer = "any rank" if src is None else f"rank {src}"
        operation = self._operations("recv", [tensor], self._timeout, f"from {peer}, tag {tag}")
        staged = dense_outputs([tensor])
        source = self._mpi.ANY_SOURCE if src is None else src
        return self._message(operation, staged.stand_ins[0], source, tag, staged.last_step)

    def _message(
        self,
        operation: Operation,
        data: torch.Tensor,
        peer: int,
        tag: int,
        after: Callable[[], None] | None = None,
    ) -> Work:
        self._health.check_usable(operation)  # before the store is asked for the tag
        mpi, nbytes, own_tag = self._mpi, byte_count(data), self._tags.of(tag)
        count, kind = (nbytes, mpi.BYTE) if nbytes <= _MOST else (1, _type_of(mpi, nbytes))
        _synchronize_streams([data])
        return self._health.issue(
            operation,
            lambda: self._core.issue_message(
                operation.name == "send", data.data_ptr(), count, kind.handle, peer, own_tag
            ),
            True,
            [data],
            _on_device(operation.outputs, after),
            nbytes,
        )

    # ---- life ----------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Breaks the group at once; see :meth:`collectives.ProcessGroup.abort`."""
        if self._health.abort():
            self._health.leave()

    def shutdown(self) -> None:
        """Finishes the operations already issued, then frees the communicators.

        MPI may wait there for ranks that have not called this; after ten seconds the group goes on without.
        """
        if not self._health.shutdown():
            return
        communicators = self._communicator, self._own_communicator

        def free() -> None:
            with self._health.calling:
                for communicator in communicators:
                    communicator.Free()

        try:
            if not self._library.any_thread:  # MPI itself has no limit then
                limit = timedelta(seconds=_FREE_SECONDS)
                exchange(self._shared, "free", self._rank, range(self._size), limit, self.where())
            self._library.within(_FREE_SECONDS, free)
        except (TimeoutError, DistError):
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
