"""The host backend: CPU tensors over shared memory on a machine, and TCP between machines."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.futures import Future

import collectives._native as _native
from collectives.backends._shared.arithmetic import REDUCTIONS
from collectives.backends._shared.dense_call import DenseCall
from collectives.backends._shared.exit_reasons import abort_reason, exception_behind
from collectives.backends.host.rendezvous import form
from collectives.backends.host.threads import HostOptions
from collectives.core.arguments.staging import dense, dense_outputs, is_dense
from collectives.core.capabilities import Capabilities
from collectives.core.completions import complete_after
from collectives.core.native_dtypes import NATIVE_CODES, native_count
from collectives.core.operations import ALL_REDUCE_COALESCED, Call
from collectives.core.process_group import ProcessGroup
from collectives.core.profiling import profiler
from collectives.core.types import default_pg_timeout, nanoseconds
from collectives.core.work import COMPLETED, CollectiveFuture, CompletedWork, Work, settle
from collectives.errors import DistError, GroupAbortedError
from collectives.registry.backends import GroupOptions
from collectives.time_limits import seconds_to_wait

_ANY_RANK = -1
_CAPABILITIES = Capabilities(
    devices=frozenset({"cpu"}),
    reductions=REDUCTIONS,
    moves=frozenset(NATIVE_CODES),
)

_futures_lock = threading.Lock()
"""One for all Works, few of which are asked for a future."""

for _type in (torch.Tensor, torch.nn.Parameter):
    _native.register_tensor_type(_type)


def _as_tuple(operand: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of an operand now, because the caller may change a list of them later."""
    if operand is None:
        return ()
    return (operand,) if isinstance(operand, torch.Tensor) else tuple(operand)


class HostWork(Work):
    """An operation that the core runs in the background.

    Args:
        task: the operation, which keeps its tensors until it is done.
        outputs: its output tensors.
        group: its group, which must stay as long as somebody may wait.
    """

    __slots__ = ("_future", "_group", "_outputs", "_task")

    def __init__(
        self, task: _native.HostTask, outputs: Sequence[torch.Tensor], group: ProcessGroupHost
    ) -> None:
        self._task = task
        self._outputs = outputs
        self._group = group
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks with the GIL released; a signal handler that raises ends the wait.

        The collective continues. A point-to-point operation continues if another thread waits for it or a
        later one was issued; otherwise it is suspended until :meth:`wait` or :meth:`is_completed` is called.
        """
        seconds = None if timeout is None else seconds_to_wait(timeout) or None
        if not self._task.wait(seconds):
            raise self._group._native.not_done(self._task, seconds or 0.0)
        self._raise_failure()
        return True

    def _rest(self) -> None:
        self._task.rest()

    def _error(self) -> BaseException | None:
        error = self._task.error()
        if error is not None:
            self._group.flight_record.tell_first_error()
        return error

    def _raise_failure(self) -> None:
        error = self._error()
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """Returns whether the operation is done or failed; helps a point-to-point operation on."""
        return self._task.poll()

    def exception(self) -> BaseException | None:
        """Returns the error of a failed operation."""
        return self._error()

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors."""
        if not self._task.finished():
            raise RuntimeError("the operation is still pending; call wait() before result()")
        self._raise_failure()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Returns the sender of a receive."""
        if not self._task.finished():
            raise RuntimeError("the operation is still pending; call wait() before source_rank()")
        return super().source_rank() if self._task.source < 0 else self._task.source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the output tensors."""
        with _futures_lock:
            if self._future is not None:
                return self._future
            kind = Future if self._task.is_message else CollectiveFuture
            future: Future[list[torch.Tensor]] = kind()
            self._future = future
        # Without the lock: what is told of an error may be the user's, and ask for futures.
        try:
            if self._task.poll():
                self._complete(future)
            else:
                complete_after(self._task, id(self._group), partial(self._complete, future))
        except BaseException:
            self._future = None
            raise
        return future

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        settle(future, self._error(), self._outputs)

    @property
    def task(self) -> _native.HostTask:
        """The operation in the core."""
        return self._task


class ProcessGroupHost(ProcessGroup):
    """Collective communication on the CPU: shared memory on a machine, TCP between machines.

    Every data type that torch has for dense CPU tensors moves; the kernels' table says which reductions each
    has. Results are bitwise the same on all ranks, and depend on neither size, chunking, alignment nor
    timing: a reduction combines the ranks' elements in rank order in a wider accumulator and rounds once.

    A synchronous operation on an idle group runs on the caller's thread, every other one on a thread of the
    group that never holds the GIL. Ranks that issue different operations all raise
    :class:`~collectives.CollectiveMismatchError`, before any output is written; a rank that dies raises
    :class:`~collectives.PeerLostError` on all others, on its machine within a second, on other machines
    within two. A machine that vanishes is noticed within six seconds; a process that is merely stopped is not
    taken for a dead one.

    An operation that is not done within its time limit raises :class:`~collectives.CollectiveTimeoutError`,
    which says of every rank what it waits in or did last. A collective breaks the group for all ranks then,
    as does a send of which a part has left; the error says so, all ranks raise from then on, and the way out
    is a new group. A send that has not started is cancelled, and a receive that times out loses no data: what
    has come of its message goes to the next receive that names its sender and tag. Both leave the group
    usable.

    Which ranks are on one machine is not configured but proved, by attaching shared memory. Ranks on
    different machines reach each other at the address from which the store is reached;
    ``COLLECTIVES_SOCKET_IFNAME`` (or ``GLOO_SOCKET_IFNAME``) names other network interfaces (comma-separated,
    the same number on every rank). Then every rank listens on a port that the system chooses,
    and has one more thread. Both ends of a connection prove that they know the job's secret, which ranks on
    different machines must have (``COLLECTIVES_SECRET``). What they send each other is encrypted, unless
    ``COLLECTIVES_ENCRYPTION`` is ``off`` on all of them. ``COLLECTIVES_HOST_MACHINE`` divides a machine:
    ranks with different labels share no memory.

    Memory beyond the tensors: 0.1 MiB a rank; some 4 MiB (5 in a group of two) from the first collective on
    that takes more than 4 KiB of a rank (more between machines); and up to 1 MiB for each rank that it sends
    messages to, but no more than 4 MiB for all of them where they are 256 or fewer. Where there is none, that
    operation breaks the group with a :class:`~collectives.DistBackendError` on all ranks.

    Long messages are moved and reduced by several threads of each rank where there are cores for them
    (:class:`~collectives.backends.host.HostOptions`); each operation takes as many as its size is worth. They
    sleep between operations.

    How an operation is carried out depends on thresholds that rank 0 may read from a file
    (:mod:`collectives.backends.host.tuning_file`); they change no bit of a result.

    Args:
        store: the group's own store; used only here.
        rank: this process's rank within the group.
        size: number of ranks.
        timeout: time limit of forming the group, and of operations that name none.
        group_name: name, unique in the job.
        group_desc: free text.
        unformed: whether to connect with nobody: operations raise until :meth:`reconfigure` is called.
        threads: of this rank, for long messages; see :class:`~collectives.backends.host.HostOptions`.

    Raises:
        CollectiveTimeoutError: a rank did not come in time.
        DistNetworkError: ranks on different machines cannot reach each other.
        DistBackendError: there is not enough shared memory.
    """

    _is_recorded = True

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = default_pg_timeout,
        *,
        group_name: str = "",
        group_desc: str = "",
        unformed: bool = False,
        threads: int | None = None,
    ) -> None:
        super().__init__(
            rank, size, timeout=timeout, store=store, group_name=group_name, group_desc=group_desc
        )
        self._timeout_ns = nanoseconds(self._timeout)
        self._threads = threads
        if unformed:
            self._native = form(
                store, 0, 1, self._timeout, self.describe(), self._flight_record.of_core, threads=threads
            )
            self._native.fail(GroupAbortedError("it has no members yet: call reconfigure() first", rank))
        else:
            self._connect(store)
        _live.add(self)

    def _form(self, store: Any, limit: timedelta, look: Callable[[], DistError | None]) -> None:
        self._native = form(
            store,
            self._rank,
            self._size,
            limit,
            self.describe(),
            self._flight_record.of_core,
            look,
            self._threads,
        )
        self._native.set_timeout(self._timeout_ns)

    @property
    def capabilities(self) -> Capabilities:
        """CPU tensors; every dense data type."""
        return _CAPABILITIES

    @property
    def detects_mismatch(self) -> bool:
        """``True``: every collective begins by comparing what the ranks call."""
        return True

    def lost_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, or whose machines have vanished, as far as is known.

        On one machine that is known at once. Empty once the group has ended.
        """
        return self._native.lost_ranks()

    def name(self) -> str:
        """Returns ``"host"``."""
        return "host"

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of all future operations that name none."""
        super().set_timeout(timeout)
        self._timeout_ns = nanoseconds(self._timeout)
        self._native.set_timeout(self._timeout_ns)

    # ---- collectives ---------------------------------------------------------------------------------

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
        """Issues a collective where the core takes the arguments as they are."""
        if profiler._is_profiler_enabled:
            return None
        if not async_op:
            try:
                done = self._native.fast_collective(opcode, output, input, reduce_op, root, list_form)
            except DistError:
                self._flight_record.tell_first_error()
                raise
            return COMPLETED if done else None
        task = self._native.fast_collective_async(opcode, output, input, reduce_op, root, list_form)
        return None if task is None else HostWork(task, _as_tuple(output), self)

    def issue(self, call: Call) -> Work:
        """Runs a collective, or queues it where it is asynchronous."""
        if call.operation is ALL_REDUCE_COALESCED:
            return super().issue(call)
        dense_call = DenseCall(call, self._rank, self._size)
        try:
            task = self._native.collective(
                *dense_call.arguments(),
                self._timeout_ns if call.timeout is None else nanoseconds(call.timeout),
                not call.async_op,
                dense_call.tensors,
            )
        except DistError:
            self._flight_record.tell_first_error()
            raise
        work = CompletedWork(call.outputs) if task is None else HostWork(task, call.outputs, self)
        finishing = dense_call.staged.finish(work, call.async_op)
        if finishing is not work and not call.async_op:
            finishing.wait()
        return finishing

    # ---- point-to-point ------------------------------------------------------------------------------

    def fast_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, async_op: bool = False
    ) -> Work | None:
        """Posts a message or a receive where the core takes the arguments as they are."""
        if profiler._is_profiler_enabled:
            return None
        task = None
        try:
            task = self._native.fast_message(sends, tensor, peer, tag, not async_op)
            if task is None:
                return None
            return COMPLETED if task is True else HostWork(task, () if sends else (tensor,), self)
        except DistError:
            self._flight_record.tell_first_error()
            raise
        except BaseException:  # of a signal handler
            if isinstance(task, _native.HostTask):
                task.rest()
            raise

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Sends a tensor; done when the message is whole in shared memory or with the network.

        The time limit that the group has now holds from now on; the class says what it does to a message that
        has left in part.
        """
        return self._message(True, dense(tensor), dst, tag, ())

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        """Receives a tensor; a receive that fails may have overwritten a part of it."""
        if not is_dense(tensor):
            staged = dense_outputs([tensor])
            return staged.finish(self._recv(staged.stand_ins[0], src, tag), False)
        return self._message(False, tensor, _ANY_RANK if src is None else src, tag, (tensor,))

    def _message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, outputs: Sequence[torch.Tensor]
    ) -> Work:
        task = self._native.message(
            sends,
            tensor.data_ptr(),
            native_count(tensor),
            NATIVE_CODES[tensor.dtype],
            peer,
            tag,
            self._timeout_ns,
            tensor,
        )
        return HostWork(task, outputs, self)

    # ---- life ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Breaks the group at once, for this rank and its peers; operations in flight raise."""
        self._native.fail(abort_reason(f"rank {self._rank} aborted it", self._rank))
        self._native.shutdown(False)

    def _first_cause(self) -> DistError | None:
        return self._native.failure()

    def _break_for(self, cause: DistError) -> None:
        self._native.fail(cause)

    def shutdown(self) -> None:
        """Ends the group: operations already issued come to their end, then threads and memory are freed."""
        self._native.shutdown(True)

    def report(self) -> str:
        """Returns a line for each rank: what it waits in or did last, and since when; asks no peer."""
        return self._native.report()


_live: weakref.WeakSet[ProcessGroupHost] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends groups that nobody destroyed; other ranks hear of an exception that ended the program."""
    for group in list(_live):
        with contextlib.suppress(Exception):
            group.abort() if exception_behind() else group._native.shutdown(False)


option_names = HostOptions.names


def capabilities() -> Capabilities:
    """Returns what groups can do."""
    return _CAPABILITIES


def create(options: GroupOptions) -> ProcessGroupHost:
    """Returns a new group; called by all its ranks, blocks until they have met.

    Args:
        options: ``pg_options`` may be :class:`HostOptions` or a dict of its fields.

    Raises:
        TypeError: they are something else.
        ValueError: a field is out of its range, or the environment's.
    """
    where = f"[rank {options.rank}] pg_options of the host backend:"
    chosen = HostOptions.of(options.pg_options, where, HostOptions)
    return ProcessGroupHost(**options.membership(), unformed=options.unformed, threads=chosen.threads)
