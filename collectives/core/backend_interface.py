"""What all groups are and what a backend implements: operations that it must, others derived from those.

Operations keep the contract of :class:`~collectives.ProcessGroup`, whose public methods check the arguments
first. Costs are stated in S, the bytes of one rank's tensor, for n ranks.
"""

from __future__ import annotations

import enum
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext, suppress
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
from collectives.store.joining.meeting_place import MeetingPlace, Members
from collectives.store.prefix import PrefixStore
from collectives.time_limits import left_until, time_limit

RECONFIGURE = "reconfigure"
"""The operation that errors name whose group was broken because it takes other members."""

_TAG = 2**31 - 1
"""Tag of the messages of derived collectives; they arrive in order, so one tag is enough."""


class HostCopy:
    """A copy that was begun; see :meth:`collectives.ProcessGroup.to_host_later`.

    Args:
        result: returns the values; blocks until they are there. Raises a :class:`~collectives.DistError`
            where the group broke meanwhile, so that they may be anything.
        done: returns whether ``result`` would wait for nothing; never blocks. A copy that is made when its
            values are asked for, as of tensors on the CPU, is done from the start.
    """

    __slots__ = ("done", "result")

    def __init__(self, result: Callable[[], torch.Tensor], done: Callable[[], bool] = lambda: True) -> None:
        self.result = result
        self.done = done


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
        self._generation = 0
        self._meeting_place: MeetingPlace | None = None
        self._members_changed: Callable[[Any, Members], None] | None = None
        self._is_part = False
        self._world = ""
        self._inherited = False
        self._global_ranks: tuple[int, ...] = tuple(range(size))
        self._flight_record = FlightRecord(dump.dump_at_error)
        dump.groups.add(self)
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
        dump.groups.note_change()

    @property
    def flight_record(self) -> FlightRecord:
        """The last operations of the group, and totals of all of them."""
        return self._flight_record

    @property
    def is_recorded(self) -> bool:
        """Whether the group itself enters its operations into :attr:`flight_record`."""
        return self._is_recorded

    def _number_begun(self) -> int:
        """Returns how many operations this rank has begun; zero where nothing is recorded."""
        return self._flight_record.begun

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

    def _recorded(self) -> dict[str, Any]:
        """Returns what dumps tell of the group."""
        record = self._flight_record
        operations = record.operations()
        return {
            "name": self._group_name,
            "description": self._group_desc,
            "backend": self.name(),
            "rank": self._rank,
            "size": self._size,
            "generation": self.generation,
            "global_ranks": list(self._global_ranks),
            "begun": record.begun,
            "stats": self.stats(),
            "operations": [
                {**operation.values(), "generation": record.generation_of(operation)}
                for operation in operations
            ],
        }

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
        generation = f", generation {self._generation}" if self._generation else ""
        return f"{self.name()} group {self._group_name!r}{desc} of {self._size}{generation}"

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
        return HostCopy(partial(self.to_host, tensor))

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
        connects = self.supports_reconfigure or type(self)._connect is not BackendInterface._connect
        if self._store is None or not connects:
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

        Backends that can take other members implement :meth:`_form` instead.

        Args:
            store: a part of the group's store that holds nothing of an earlier time.
        """
        self._form(store, self._timeout, lambda: None)

    # ---- other members ---------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can take other members, by :meth:`reconfigure`."""
        return type(self)._form is not BackendInterface._form

    @property
    def generation(self) -> int:
        """How often the group has taken other members."""
        return self._generation

    def reconfigure_handle(self) -> str:
        """Returns the text by which :meth:`reconfigure` knows this process, for this group.

        The process listens from the first call on, at the address from which it reaches the group's store, or
        that ``COLLECTIVES_SOCKET_IFNAME`` names. The handle stays the same, and holds no secret.

        Raises:
            UnsupportedOperationError: the backend does not offer it.
            DistNetworkError: the system refuses to listen.
        """
        return self._place("reconfigure_handle").handle

    def reconfigure(
        self,
        uuid: int | str,
        handles: Sequence[str] | AbstractSet[str],
        timeout: timedelta | None = None,
    ) -> None:
        """Gives the group other members, whatever happened to it before; blocks until they are connected.

        Called by all who are to be members: those who stay, and those who come, on a group of their own.
        Those who leave do not call it. The group may be idle, broken by a death, timed out, aborted, or in
        the middle of operations: what is not done once the members have met, or a fifth of a second after
        this call, raises :class:`~collectives.GroupAbortedError` on all its ranks, which says who
        reconfigures it. The object, its name, time limit and flight record stay; :meth:`rank` and
        :meth:`size` follow the handles, and :attr:`generation` counts on. The group's store becomes a new
        one, empty, which the first member serves; a former one stays while the process that serves it holds
        it.

        A call that fails leaves the group broken, with its former rank and size; another one with a new
        ``uuid`` mends it. No thread may issue operations meanwhile.

        Args:
            uuid: identifies the new set of members; the same for all, and never used before.
            handles: of all members, of their :meth:`reconfigure_handle`; the position is the rank. A set is
                sorted.
            timeout: time limit for all to come and be connected; ``None`` for the group's.

        Raises:
            UnsupportedOperationError: the backend does not offer it; nothing has changed, as with the next
                three.
            TypeError: an argument has another type.
            ValueError: a text is no handle, one comes twice, or this process's is missing.
            DistBackendError: ``uuid`` was already used, or a handle is not proved by the job's secret.
            PeerLostError: a new member has died; its ``rank`` counts among the handles.
            CollectiveTimeoutError: a new member did not come in time.
            CollectiveMismatchError: members were given different handles, or a group of some of the ranks of
                a world would have one of them twice.
            GroupAbortedError: the others have gone on without this process.
        """
        self._reconfigure(uuid, handles, timeout)

    def _reconfigure(
        self,
        uuid: int | str,
        handles: Sequence[str] | AbstractSet[str],
        timeout: timedelta | None,
        is_over: Callable[[], DistError | None] = lambda: None,
    ) -> None:
        """Does what :meth:`reconfigure` does.

        Args:
            uuid: as there, like the next two.
            handles: likewise.
            timeout: likewise.
            is_over: returns the error that ends it for all where the others are known not to come; asked
                again and again until they have.
        """
        limit = check.check_limit(self, "reconfigure", timeout, positive=True) or self._timeout
        end = time.monotonic() + limit.total_seconds()
        invitation = self._place("reconfigure").invited(uuid, handles, f"{self.where()} reconfigure:")
        cause = GroupAbortedError(
            f"rank {self._rank} reconfigures the group, as {invitation.uuid}",
            self._rank,
            operation=RECONFIGURE,
        )
        known = self._rank < len(self._global_ranks)
        about = self._global_ranks[self._rank] if known else self._rank

        def others_are_late() -> DistError | None:
            self._break_for(cause)
            return is_over()

        with invitation.blaming_server():
            try:
                # Not at once: others may be about to end what this rank has ended.
                members = invitation.meet(
                    limit,
                    f"{self._kind()}{self._world}",
                    about,
                    self._generation,
                    others_are_late,
                    distinct=self._is_part,
                )
            finally:
                self._break_for(cause)
        former = self._rank, self._size, self._generation
        limit = left_until(end)
        try:
            with invitation.blaming_server(), invitation.agreeing(members, limit) as look:
                self._take_members(members, members.store, limit, look)
        except BaseException as error:
            self._count_as(*former)
            failed = GroupAbortedError(
                f"rank {self._rank} could not reconfigure the group: {error}",
                self._rank,
                operation=RECONFIGURE,
            )
            # Others wait for this rank, or have gone on, and are to hear of the same death.
            why: DistError = error if isinstance(error, PeerLostError) else failed
            with suppress(Exception):
                self._break_for(why)  # what is connected already must not go on without the others
            with suppress(Exception):
                self.abort()
            raise
        self._become_new(members.store)
        if self._is_part or len({*members.global_ranks}) == members.size:
            self.set_global_ranks(members.global_ranks)
        if self._members_changed is not None:
            self._members_changed(self, members)

    def _when_members_change(self, follow: Callable[[Any, Members], None], world: str = "") -> None:
        """Has a function called with the group and its new members whenever it has taken others.

        Args:
            follow: the function.
            world: of a group that takes members of one world only, what tells that from others.
        """
        self._members_changed = follow
        self._is_part = bool(world)
        self._world = world and f" in world {world}"

    def _succeed(self, former: BackendInterface) -> None:
        """Takes the place of a group of which this one has some of the ranks: handle and generation go on."""
        self._meeting_place, former._meeting_place = former._meeting_place, None
        self._generation = former._generation + 1

    def _leave_place(self) -> None:
        """Listens no more for processes that would be members, unless another group does."""
        if self._meeting_place is not None:
            self._meeting_place.close()
            self._meeting_place = None

    def _kind(self) -> str:
        """Returns what must be the same on all members, in words."""
        return self.name()

    def _place(self, operation: str) -> MeetingPlace:
        """Returns where others find this process for this group."""
        self._demand_reconfigures(operation)
        if self._meeting_place is None:
            self._meeting_place = MeetingPlace(self._store)
        return self._meeting_place

    def _demand_reconfigures(self, operation: str) -> None:
        """Raises where the backend cannot give a group other members."""
        if not self.supports_reconfigure:
            check.fail(
                self,
                operation,
                f"{self.name()} cannot give a group other members, as host and round_robin over it can; "
                "shrink_group makes a new group without some ranks, and init_process_group a new world",
                UnsupportedOperationError,
            )

    def _take_members(
        self, members: Members, store: Any, limit: timedelta, look: Callable[[], DistError | None]
    ) -> None:
        """Ends the connections that are left, and connects the ranks; called by all of them, blocks.

        Rank and size are the new ones afterwards, also where it fails.

        Args:
            members: who they are.
            store: a store of this group's own.
            limit: time limit.
            look: returns the error for a member that has died, if any; asked again and again.
        """
        self.abort()
        self._count_as(members.rank, members.size, members.generation)
        self._form(store, limit, look)

    def _count_as(self, rank: int, size: int, generation: int) -> None:
        self._rank, self._size, self._generation = rank, size, generation

    def _become_new(self, store: Any) -> None:
        """Forgets what counts operations of the former members; rank and size are the new ones already.

        Args:
            store: the group's from now on.
        """
        self._store = store
        self._flight_record.begin_generation()
        self._renewals = 0
        self._monitored_barriers = itertools.count()
        self.set_global_ranks(range(self._size))

    def _form(self, store: Any, limit: timedelta, look: Callable[[], DistError | None]) -> None:
        """Connects ranks that may be others than before; called by all of them, blocks.

        Args:
            store: a store of their own.
            limit: time limit.
            look: see :meth:`_take_members`.
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
            reconfigure=partial(self._refuse_in_child, "reconfigure"),
            reconfigure_handle=partial(self._refuse_in_child, "reconfigure_handle"),
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
            The Work, see :meth:`fast_collective`; ``None`` with nothing done.
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

    def _at_first_error(self, listener: Callable[[str], None]) -> None:
        """Has a function called with the text of the group's first error, on the thread that finds it."""
        self._flight_record.at_first_error.append(listener)

    def _find_cause(self) -> DistError | None:
        """Returns :meth:`_first_cause`, after asking the other ranks where they tell of it only when asked.

        May take a second.
        """
        return self._first_cause()

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
