"""What all groups are and what a backend implements: operations that it must, others derived from those.

Operations keep the contract of :class:`~collectives.ProcessGroup`, whose public methods check the arguments
first. Costs are stated in S, the bytes of one rank's tensor, for n ranks.
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch

from collectives.core.arguments import validation as check
from collectives.core.arguments.staging import dense, dense_outputs, is_dense, write
from collectives.core.capabilities import Capabilities
from collectives.core.operations import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Call
from collectives.core.recording import dump
from collectives.core.recording.flight_record import FlightRecord, Totals
from collectives.core.types import ReduceOp, default_pg_timeout
from collectives.core.work import CoalescedWork, FinishingWork, Work
from collectives.dynamo import Uncompiled
from collectives.errors import (
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    PeerLostError,
    UnsupportedOperationError,
    ranks_in_words,
)
from collectives.forks import belongs_to_parent, call_in_forked_children
from collectives.store.joining.agreement import exchange
from collectives.store.prefix import PrefixStore
from collectives.time_limits import time_limit

_TAG = 2**31 - 1
"""Tag of the messages of derived collectives; they arrive in order, so one tag is enough."""


class HostCopy(ABC):
    """A copy that was begun; see :meth:`collectives.ProcessGroup.to_host_later`."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether :meth:`result` would not block; never blocks."""

    @abstractmethod
    def result(self) -> torch.Tensor:
        """Returns the values; blocks until they are there.

        Raises:
            DistError: the group broke meanwhile, so that they may be anything.
        """


class LateHostCopy(HostCopy):
    """A copy that is made when its values are asked for, as of tensors on the CPU.

    Args:
        make: makes it, as :meth:`collectives.ProcessGroup.to_host`.
    """

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def done(self) -> bool:
        """Returns ``True``: what the copy waits for is not begun later."""
        return True

    def result(self) -> torch.Tensor:
        """Makes the copy."""
        return self._make()


class BackendInterface(Uncompiled, ABC):
    """A group without its public operations, which :class:`~collectives.ProcessGroup` adds.

    Ranks count within the group, and arguments of operations are checked. A child that was forked is no
    member: operations raise there, and ending the group ends nothing.
    """

    class BackendType(enum.IntEnum):
        """Kinds of backends; numbers as in ``torch.distributed``."""

        UNDEFINED = 0
        GLOO = 1
        NCCL = 2
        UCC = 3
        MPI = 4
        XCCL = 5
        CUSTOM = 6

    backend_type: ClassVar[BackendType] = BackendType.CUSTOM

    _is_recorded: ClassVar[bool] = False
    """Whether the class enters its operations into :attr:`flight_record`."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        timeout: timedelta = default_pg_timeout,
        store: Any = None,
        group_name: str = "",
        group_desc: str = "",
    ) -> None:
        if size < 1:
            raise ValueError(f"a group has at least one rank, but size is {size}")
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}, but the ranks of a group of {size} are 0 to {size - 1}")
        self._rank = rank
        self._size = size
        self._timeout = time_limit(timeout)
        self._store = store
        self._group_name = group_name
        self._group_desc = group_desc
        self._admitted: set[tuple[Any, ...]] = set()
        self._monitored_barriers = itertools.count()
        self._renewals = 0
        self._inherited = False
        self._global_ranks: tuple[int, ...] = tuple(range(size))
        self._flight_record = FlightRecord(dump.dump_at_error)
        if self._is_recorded:
            dump.register(self)
        dump.watch_for_signal()
        call_in_forked_children(self, _leave_to_parent)

    def rank(self) -> int:
        """Returns this process's rank within the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    def getBackendName(self) -> str:
        """Returns :meth:`name`."""
        return self.name()

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Ranks of the members in the default group, by group rank, as the group was made."""
        return self._global_ranks

    def set_global_ranks(self, ranks: Sequence[int]) -> None:
        """Notes the ranks of the members in the default group; called where groups are made.

        Args:
            ranks: one for each member, by group rank.
        """
        self._global_ranks = tuple(ranks)

    @property
    def flight_record(self) -> FlightRecord:
        """The last operations of the group, and totals of all of them."""
        return self._flight_record

    def stats(self) -> Totals:
        """Returns what the group has done so far, by names of operations.

        Of a composition such as ``round_robin``, the sums of its groups. Messages of ``host`` that leave or
        arrive at once, which takes less than looking at the clock, add no seconds.

        Returns:
            By name: ``count``, the operations begun; ``bytes``, those of their tensors on this rank;
            ``errors``, the operations that failed; ``seconds``, the time between their begins and ends.

        Example:
            With 2 ranks::

                group = collectives.new_group(backend="gloo")
                collectives.all_reduce(torch.ones(4), group=group)
                group.stats()["all_reduce"]["bytes"]  # 16
        """
        return self._flight_record.totals()

    @property
    def group_name(self) -> str:
        """Name of the group, unique in the job."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """Free text that describes the group."""
        return self._group_desc

    def get_group_store(self) -> Any:
        """Returns the group's key/value store, or ``None`` where it was made without one."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """Time limit of operations that name none."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of operations that name none, for those issued from now on.

        Args:
            timeout: the limit, above zero.

        Raises:
            TypeError: it is no ``timedelta``.
            ValueError: it is not above zero.
        """
        self._timeout = time_limit(timeout)

    def describe(self) -> str:
        """Returns the group in words, for messages."""
        desc = f" ({self._group_desc})" if self._group_desc else ""
        return f"{self.name()} group {self._group_name!r}{desc} of {self._size}"

    def where(self) -> str:
        """Returns rank and group, to stand in front of a message."""
        return f"[rank {self._rank}] {self.describe()}:"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._group_name!r} rank {self._rank} of {self._size}>"

    def supports(self, operation: str, **about: Any) -> bool:
        """Returns whether the group offers an operation.

        Args:
            operation: name of the user function, such as ``"all_reduce"``.
            about: ``device``, ``dtype`` and ``op``, as
                :meth:`~collectives.core.capabilities.Capabilities.why_not` takes them; that gives the reason.

        Example:
            With any number of ranks::

                group = collectives.group.WORLD
                op = collectives.ReduceOp.BXOR
                group.supports("all_reduce", dtype=torch.float32, op=op)  # False
                group.capabilities.why_not("all_reduce", dtype=torch.float32, op=op)  # "BXOR is not ..."
        """
        return self.capabilities.why_not(operation, **about) is None

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an output of finished operations in memory of the host; blocks until its values are there.

        For CUDA tensors ``Work.wait()`` returns before an operation is done, which may still fail and leave
        anything in its outputs. The copy that this returns is right.

        Args:
            tensor: the output; returned as it is where it lies on the CPU.

        Raises:
            DistError: the group broke meanwhile.
        """
        values = tensor.detach().cpu()
        self._raise_failure()
        return values

    def is_stream_ordered(self, device: torch.device) -> bool:  # noqa: ARG002 - derived classes look at it
        """Returns whether ``Work.wait()`` lets the current stream wait, and the host go on.

        An operation may fail after that, and its outputs are right only where :meth:`to_host` says so.

        Args:
            device: of the tensors.
        """
        return False

    def is_capturing(self, device: torch.device) -> bool:  # noqa: ARG002 - derived classes look at it
        """Returns whether what this thread issues now becomes part of a CUDA graph, and does not run.

        Args:
            device: where it is issued.
        """
        return False

    def to_host_later(self, tensor: torch.Tensor) -> HostCopy:
        """Begins :meth:`to_host`, and does not block.

        Args:
            tensor: the output, which stays as it is until its values were asked for.

        Returns:
            The copy, whose ``result()`` waits for the values.
        """
        return LateHostCopy(partial(self.to_host, tensor))

    def check_before_shutdown(self, check: Callable[[], None]) -> None:
        """Registers a check that an orderly shutdown calls first.

        It looks at operations that may fail after ``wait()`` returned. :meth:`shutdown` raises its error
        after the group has ended. Here ``wait()`` raises every error, so that nothing is registered.

        Args:
            check: a method, whose object is not kept alive.
        """

    # ---- after a failure -------------------------------------------------------------------------

    def _renew(self, others_are_late: Callable[[], object] = lambda: None) -> None:
        """Connects the ranks anew, as after something broke the group; called by all of them, blocks.

        What is still in flight fails. Names, time limits and the flight record stay; operations count anew.

        Args:
            others_are_late: called again and again, first after a fifth of a second, while this rank waits
                for others, which may not know that they are to call this.

        Raises:
            UnsupportedOperationError: the backend does not offer it, or the group was made without a store.
            PeerLostError: a rank has died.
            DistError: a rank did not come in time, or could not be reached.
        """
        if self._store is None or type(self)._connect is BackendInterface._connect:
            why = "it has no store" if self._store is None else "its backend does not offer that"
            raise UnsupportedOperationError(f"{self.where()} its ranks cannot be connected anew: {why}")
        self._renewals += 1
        store = PrefixStore(f"renewed/{self._renewals}", self._store)
        exchange(
            store,
            "ranks",
            self._rank,
            range(self._size),
            self._timeout,
            self.where(),
            why=self._why_not_renewed,
            lost_ranks=self.lost_ranks,
            look=others_are_late,
        )
        self.abort()
        self._connect(store)

    def _why_not_renewed(self, absent: Sequence[int], died: bool) -> DistError:
        cause = self._first_cause()
        why = "" if cause is None else f" ({cause})"
        text = f"it is broken{why} and cannot be connected anew: {ranks_in_words(absent)}"
        if died:
            return PeerLostError(f"{text} died", absent[0])
        limit = f"{self._timeout.total_seconds():g} s"
        return CollectiveTimeoutError(f"{text} did not come within {limit}", absent[0], missing_ranks=absent)

    def _connect(self, store: Any) -> None:
        """Connects the ranks, as when the group was made; called by all of them, blocks.

        Args:
            store: a part of the group's store that holds nothing of an earlier time.
        """
        raise NotImplementedError

    # ---- forks -----------------------------------------------------------------------------------

    def _leave_to_parent(self) -> None:
        """Called in a child that this process has forked: operations raise there, and its end ends nothing.

        Whatever a backend does besides, it must not wait, and not take a lock that a thread of the parent may
        have held.
        """
        self._inherited = True
        # in front of the class's own, so that no operation of the parent asks where it runs
        vars(self).update(
            _admit=self._refuse_in_child,
            issue=lambda call: self._refuse_in_child(call.operation.name),
            monitored_barrier=partial(self._refuse_in_child, "monitored_barrier"),
            abort=_end_nothing,
            shutdown=_end_nothing,
        )

    def _refuse_in_child(self, operation: str, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        check.fail(self, operation, belongs_to_parent("the group"), GroupAbortedError)

    # ---- checks ----------------------------------------------------------------------------------

    def _admit(
        self,
        operation: str,
        tensor: torch.Tensor,
        op: ReduceOp | None = None,
    ) -> None:
        """Raises unless the group can run the operation on such a tensor; remembers what it admitted."""
        reduction = None if op is None else (op.code, op.factor is None)
        key = (operation, tensor.dtype, tensor.device, tensor.layout, reduction)
        if key not in self._admitted:
            if op is not None:
                check.check_factor(self, operation, op)
            check.check_offered(self, operation, tensor, op)
            self._admitted.add(key)

    # ---- what a backend implements ---------------------------------------------------------------

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this group can do; constant over its life."""

    @property
    def detects_mismatch(self) -> bool:
        """Whether ranks that call different collectives get an error instead of waiting for ever."""
        return False

    def lost_ranks(self) -> list[int]:
        """Returns the ranks of this group that are known to have died, without waiting for news of any.

        Empty where the backend does not watch its ranks.
        """
        return []

    @abstractmethod
    def name(self) -> str:
        """Returns the backend's name, such as ``"host"``."""

    def issue(self, call: Call) -> Work:
        """Issues a collective whose arguments were checked.

        A backend implements this method, or one for each collective, by the name of its user function with an
        underscore in front: ``_broadcast(call)``, ``_all_reduce(call)`` and ``_all_gather(call)`` at least.
        What it leaves out is derived from these.

        Args:
            call: the collective, with its tensors and options.

        Returns:
            Work whose result is the outputs of the call.
        """
        handler: Callable[[Call], Work] | None = getattr(self, call.operation.handler, None)
        if handler is None:
            raise NotImplementedError(
                f"{type(self).__name__} implements neither issue() nor {call.operation.handler}()"
            )
        return handler(call)

    @abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Sends a tensor; done when it may be overwritten."""

    @abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        """Receives a tensor; from any rank when ``src`` is ``None``. The finished Work knows the sender."""

    @abstractmethod
    def abort(self) -> None:
        """Breaks the group at once: every operation waiting on this rank raises ``GroupAbortedError``.

        May be called from any thread, any number of times, never blocks on peers. Peers that wait for this
        rank raise as soon as the backend lets them know. Resources are freed.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the group in order: finishes what was issued, then frees threads, memory and connections.

        Idempotent. All ranks call it; none waits for another beyond outstanding operations.
        """

    # ---- the fast path -----------------------------------------------------------------------------

    def fast_collective(
        self,
        opcode: int,  # noqa: ARG002
        output: Any = None,  # noqa: ARG002
        input: Any = None,  # noqa: ARG002
        reduce_op: int = 0,  # noqa: ARG002
        root: Any = 0,  # noqa: ARG002
        list_form: bool = False,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> Work | None:
        """Issues a collective whose arguments need neither checks nor conversions in Python; optional.

        Callers that want the shortest way try this first, once, and call the ordinary method where it returns
        ``None``. Ranks may differ in that: both ways carry out the same operation. A backend takes the calls
        that nearly all calls are, such as dense tensors of one data type with the group's own time limit, and
        leaves the rest to the ordinary methods, wrong arguments among it. Here it takes none.

        Args:
            opcode: number of the collective, of :mod:`collectives.core.operations`.
            output: what is written, or read and written.
            input: what is only read.
            reduce_op: code of the :class:`~collectives.ReduceOp`.
            root: the root, counted within the group.
            list_form: whether the larger operand is a list of one tensor for each rank.
            async_op: whether to return before the operation is done.

        Returns:
            The Work, for a synchronous operation :data:`~collectives.core.work.COMPLETED`; ``None`` with
            nothing done.

        Raises:
            DistBackendError: the operation was taken, and failed.
        """
        return None

    def fast_message(
        self,
        sends: bool,  # noqa: ARG002
        tensor: torch.Tensor,  # noqa: ARG002
        peer: int,  # noqa: ARG002
        tag: int,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> Work | None:
        """Sends or receives a tensor, as :meth:`fast_collective` issues a collective.

        Args:
            sends: whether to send it, else to receive it.
            tensor: the message.
            peer: the other rank, counted within the group.
            tag: number that both sides name.
            async_op: whether to return before the operation is done.

        Returns:
            The Work, as of :meth:`fast_collective`; ``None`` with nothing done.
        """
        return None

    # ---- operations together, splits ------------------------------------------------------------------

    @property
    def needs_batches(self) -> bool:
        """Whether messages that ranks call one by one, all sending first, may wait for each other for ever.

        Those of a batch start together, and never do.
        """
        return False

    def _together(self) -> AbstractContextManager[None]:
        """Lets the operations that this thread issues in a ``with`` block start together, at its end.

        Their Works are good after the block. For groups whose operations wait for each other in the order of
        their calls; here each starts by itself.
        """
        return nullcontext()

    def _issue_together(self, issue: Callable[[], list[Work]]) -> Work:
        """Returns the one Work of several operations that ``issue`` issues, started together."""
        with self._together():
            works = issue()
        return CoalescedWork(works)

    def _settings(self) -> dict[str, int]:
        """Returns what DDP's logging data tell of the group, by the names that torch has for it."""
        return {}

    def note_refusal(self) -> None:
        """Takes note that this rank refuses an operation that the others may wait in."""

    def _raise_failure(self) -> None:
        """Raises what broke the group, where operations may fail after their ``wait()`` has returned."""

    def _first_cause(self) -> DistError | None:
        """Returns what broke the group; ``None`` where nothing has, or where the backend does not know it.

        Its attributes are those that all ranks read.
        """
        return None

    def _begin_abort(self) -> None:
        """Lets an abort begin whose end may wait for other groups; :meth:`abort` of this one follows soon.

        Called on all groups that are to be aborted before the first is. Does not block, nor raise. Nothing is
        to be done where an abort waits for no other group.
        """

    def _break_for(self, cause: DistError) -> None:  # noqa: ARG002
        """Breaks the group, unless it is, because another group of the same ranks is broken.

        All ranks raise errors with the class and the attributes that they have there. May be called from any
        thread, never blocks on peers, and leaves it to :meth:`abort` or :meth:`shutdown` to free what the
        group holds. Here it aborts, for which the other ranks blame this one.

        Args:
            cause: what broke the other group, such as its :meth:`_first_cause`.
        """
        self.abort()

    def _bind_device(self, device: torch.device) -> None:
        """Takes note that the process is bound to a device; called by all ranks, and may connect them there.

        Args:
            device: the device, with its index where it has one.
        """

    def _decline_split(self) -> None:
        """Takes part in making a group of other ranks, whose connections are split off this one's.

        Called on the ranks that do not become members; here there is nothing to split.
        """

    # ---- derived collectives --------------------------------------------------------------------------

    def _all_reduce_coalesced(self, call: Call) -> Work:
        """All-reduce of each tensor, or of a copy of it where it has gaps or shares memory with another."""
        separate = dense_outputs(call.outputs, separate=True)
        work = self._issue_together(
            lambda: [self.issue(call.as_(ALL_REDUCE, [tensor])) for tensor in separate.stand_ins]
        )
        return separate.finish(work, call.async_op)

    def _all_reduce_into_tensor(self, call: Call) -> Work:
        """All-reduce of the output, into which the input is copied."""
        if call.output.data_ptr() != call.input.data_ptr():
            write(call.output, dense(call.input))
        elif not (is_dense(call.output) and is_dense(call.input)):  # views of the same memory
            write(call.output, dense(call.input).clone())
        return self.issue(call.as_(ALL_REDUCE, call.outputs))

    def _reduce(self, call: Call) -> Work:
        """All-reduce of a copy; the root keeps the result. As much traffic as an all-reduce."""
        scratch = call.output.detach().clone()
        work = self.issue(call.as_(ALL_REDUCE, [scratch]))

        def keep() -> None:
            if call.writes_on(self._rank):
                write(call.output, scratch)

        return FinishingWork(work, keep, call.outputs, call.async_op)

    def _all_gather_into_tensor(self, call: Call) -> Work:
        """All-gather into a list of dense parts, concatenated at the end."""
        form = torch.contiguous_format
        parts = [torch.empty_like(call.input, memory_format=form) for _ in range(self._size)]
        work = self.issue(call.as_(ALL_GATHER, parts, call.inputs))
        return FinishingWork(
            work,
            lambda: write(call.output, torch.cat([part.reshape(-1) for part in parts])),
            call.outputs,
            call.async_op,
        )

    def _gather(self, call: Call) -> Work:
        """Every rank sends to the root: (n - 1) S into one rank."""
        if not call.writes_on(self._rank):
            return self._send(call.input, call.root, _TAG)
        works = [self._recv(out, r, _TAG) for r, out in enumerate(call.outputs) if r != self._rank]
        write(call.outputs[self._rank], call.input)
        return CoalescedWork(works)

    def _scatter(self, call: Call) -> Work:
        """The root sends to every rank: (n - 1) S out of one rank."""
        if self._rank != call.root:
            return self._recv(call.output, call.root, _TAG)
        works = [self._send(part, r, _TAG) for r, part in enumerate(call.inputs) if r != self._rank]
        write(call.output, call.inputs[self._rank])
        return CoalescedWork(works)

    def _reduce_scatter(self, call: Call) -> Work:
        """All-reduce of the concatenation, of which each rank keeps its part."""
        flat = torch.cat([part.detach().reshape(-1) for part in call.inputs])
        work = self.issue(call.as_(ALL_REDUCE, [flat]))
        parts = torch.split(flat, [part.numel() for part in call.inputs])
        return FinishingWork(work, lambda: write(call.output, parts[self._rank]), call.outputs, call.async_op)

    def _reduce_scatter_tensor(self, call: Call) -> Work:
        """Reduce-scatter of the list of equal parts."""
        count = call.output.numel()
        flat = call.input.detach().contiguous().view(-1)
        parts = torch.split(flat, count) if count else [call.output] * self._size
        return self.issue(call.as_(REDUCE_SCATTER, call.outputs, parts))

    def _all_to_all(self, call: Call) -> Work:
        """A message for every pair of ranks; messages take the group's time limit."""
        others = [r for r in range(self._size) if r != self._rank]
        # sends first: a backend may receive before it returns, but must not wait for receivers
        works = [self._send(call.inputs[r], r, _TAG) for r in others if call.inputs[r].numel()]
        works += [self._recv(call.outputs[r], r, _TAG) for r in others if call.outputs[r].numel()]
        write(call.outputs[self._rank], call.inputs[self._rank])
        return CoalescedWork(works)

    def _all_to_all_single(self, call: Call) -> Work:
        """All-to-all of lists of dense parts; splits count elements."""
        output, tensor = call.output, call.input
        sent = torch.split(tensor.detach().contiguous().view(-1), list(call.input_splits or ()))
        flat = torch.empty(output.numel(), dtype=output.dtype, device=output.device)
        parts = torch.split(flat, list(call.output_splits or ()))
        work = self.issue(call.as_(ALL_TO_ALL, parts, sent))
        return FinishingWork(work, lambda: write(output, flat), call.outputs, call.async_op)


def _leave_to_parent(group: BackendInterface) -> None:
    group._leave_to_parent()


def _end_nothing() -> None:
    """The end of a group in a child that was forked: the group is its parent's."""
