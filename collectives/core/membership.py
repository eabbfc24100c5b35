"""A process's membership of a group: its rank, the group's names, what may be issued, its end in a fork."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch

from collectives.core.arguments import validation as check
from collectives.core.backend_interface import BackendInterface
from collectives.core.host_copies import HostCopy, LateHostCopy
from collectives.core.recording import dump
from collectives.core.recording.flight_record import FlightRecord, Totals
from collectives.core.types import ReduceOp, default_pg_timeout
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

__all__ = ["Membership"]


class Membership(BackendInterface):
    """A group apart from its operations; arguments as :class:`~collectives.ProcessGroup`, which adds those.

    A child that was forked is no member: operations raise there, and ending the group ends nothing.
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

    def next_monitored_barrier(self) -> int:
        """Returns the number of monitored barriers so far, and counts one more."""
        return next(self._monitored_barriers)

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
        if self._store is None or type(self)._connect is Membership._connect:
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


def _leave_to_parent(group: Membership) -> None:
    group._leave_to_parent()


def _end_nothing() -> None:
    """The end of a group in a child that was forked: the group is its parent's."""
