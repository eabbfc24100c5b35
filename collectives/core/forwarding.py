"""Base of the groups that wrap others: a group whose operations run on inner groups of the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch

from collectives.core.backend_interface import HostCopy
from collectives.core.operations import ALL_REDUCE_COALESCED, Call
from collectives.core.process_group import ProcessGroup
from collectives.core.recording import dump
from collectives.core.recording.flight_record import Totals, add_totals
from collectives.core.work import Work
from collectives.errors import DistError
from collectives.store.joining.meeting_place import Members
from collectives.time_limits import left_until


def group_behind(group: object) -> ProcessGroup | None:
    """Returns the group of this package that ``group`` is, or that carries out torch's ``group``.

    ``None`` where there is none.
    """
    if isinstance(group, ProcessGroup):
        return group
    inner = getattr(group, "inner", None)
    return inner if isinstance(inner, ProcessGroup) else None


def outer_groups() -> list[ProcessGroup]:
    """Returns the groups of this process that are within no other one, as they were made."""
    groups = [group for group in dump.groups.all() if isinstance(group, ProcessGroup)]
    wrapping = [group for group in groups if isinstance(group, ForwardingGroup)]
    within = {id(inner) for group in wrapping for inner in group.inner_groups}
    return [group for group in groups if id(group) not in within]


def _on_each(name: str) -> Any:
    """Returns a method that calls that of every inner group; raises the first error after the last call."""

    def method(self: ForwardingGroup, *args: Any) -> None:
        self._each(lambda group: getattr(group, name)(*args))

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Calls that of every group; see :meth:`collectives.ProcessGroup.{name}`."
    return method


class ForwardingGroup(ProcessGroup):
    """Gives every collective and message to one of several groups, which a derived class chooses.

    Args:
        groups: the groups; the time limit is that of the first.
        store: key/value store of the whole.
        group_name: name; ``None`` for that of the first group.
        group_desc: free text; ``None`` for that of the first group.

    Raises:
        ValueError: the groups differ in rank or size.
    """

    def __init__(
        self,
        groups: Sequence[ProcessGroup],
        store: Any,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> None:
        first = groups[0]
        for i, group in enumerate(groups):
            for what, mine, other in (
                ("rank", first.rank(), group.rank()),
                ("size", first.size(), group.size()),
            ):
                if other != mine:
                    raise ValueError(
                        f"[rank {first.rank()}] the groups must be of the same ranks, but {what} is {mine} "
                        f"in group 0 ({first.group_name!r}) and {other} in group {i} ({group.group_name!r})"
                    )
        super().__init__(
            first.rank(),
            first.size(),
            timeout=first.timeout,
            store=store,
            group_name=first.group_name if group_name is None else group_name,
            group_desc=first.group_desc if group_desc is None else group_desc,
        )
        self._inner_groups = tuple(dict.fromkeys(groups))

    @property
    def inner_groups(self) -> Sequence[ProcessGroup]:
        """The groups, each once."""
        return self._inner_groups

    def _forward(self, tensor: torch.Tensor, issue: Callable[[ProcessGroup], Work]) -> Work:
        """Issues a collective or a message on the group that it is for.

        Args:
            tensor: one of its tensors; all are on one device.
            issue: issues it on a group.
        """
        return issue(self._group_for(tensor))

    @property
    def detects_mismatch(self) -> bool:
        """Whether all groups do."""
        return all(group.detects_mismatch for group in self.inner_groups)

    @property
    def needs_batches(self) -> bool:
        """Whether one of the groups does."""
        return any(group.needs_batches for group in self.inner_groups)

    def is_stream_ordered(self, device: torch.device) -> bool:
        """Returns whether a group is; see :meth:`collectives.ProcessGroup.is_stream_ordered`."""
        return any(group.is_stream_ordered(device) for group in self.inner_groups)

    def is_capturing(self, device: torch.device) -> bool:
        """Returns whether a group is captured; see :meth:`collectives.ProcessGroup.is_capturing`."""
        return any(group.is_capturing(device) for group in self.inner_groups)

    def to_host_later(self, tensor: torch.Tensor) -> HostCopy:
        """Begins to copy an output to the host; see :meth:`collectives.ProcessGroup.to_host_later`."""
        copy = self._group_for(tensor).to_host_later(tensor)

        def result() -> torch.Tensor:
            values = copy.result()
            self._raise_failure()  # of any of the groups
            return values

        return HostCopy(result, copy.done)

    check_before_shutdown = _on_each("check_before_shutdown")
    note_refusal = _on_each("note_refusal")  # nobody knows which group the operation was for
    shutdown = _on_each("shutdown")
    _begin_abort = _on_each("_begin_abort")
    _break_for = _on_each("_break_for")
    _renew = _on_each("_renew")
    _raise_failure = _on_each("_raise_failure")
    _bind_device = _on_each("_bind_device")
    _decline_split = _on_each("_decline_split")

    def _group_for(self, tensor: torch.Tensor) -> ProcessGroup:  # noqa: ARG002 - derived classes look at it
        """Returns a group that takes a tensor."""
        return self.inner_groups[0]

    @property
    def supports_reconfigure(self) -> bool:
        """Whether all groups can take other members."""
        return all(group.supports_reconfigure for group in self.inner_groups)

    def _take_members(
        self, members: Members, store: Any, limit: timedelta, look: Callable[[], DistError | None]
    ) -> None:
        end = time.monotonic() + limit.total_seconds()
        super()._count_as(members.rank, members.size, members.generation)
        for number, group in enumerate(self.inner_groups):
            group._take_members(members, self._store_for(number, store), left_until(end), look)

    def _become_new(self, store: Any) -> None:
        for number, group in enumerate(self.inner_groups):
            group._become_new(self._store_for(number, store))
        super()._become_new(store)

    def _count_as(self, rank: int, size: int, generation: int) -> None:
        super()._count_as(rank, size, generation)
        for group in self.inner_groups:
            group._count_as(rank, size, generation)

    def _store_for(self, number: int, store: Any) -> Any:  # noqa: ARG002 - derived classes look at it
        """Returns the part of the whole's store that is for an inner group, as where the whole is made."""
        return store

    def stats(self) -> Totals:
        """Returns the sums of the groups; see :meth:`collectives.ProcessGroup.stats`."""
        sums: Totals = {}
        for group in self.inner_groups:
            add_totals(sums, group.stats())
        return sums

    def _settings(self) -> dict[str, int]:
        return {name: value for group in self.inner_groups for name, value in group._settings().items()}

    def lost_ranks(self) -> list[int]:
        """Returns the ranks that any of the groups knows to have died."""
        return sorted({rank for group in self.inner_groups for rank in group.lost_ranks()})

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of all future operations that name none."""
        super().set_timeout(timeout)
        for group in self.inner_groups:
            group.set_timeout(timeout)

    def abort(self) -> None:
        """Breaks every group."""
        self._begin_abort()
        self._each(lambda group: group.abort())

    def _at_first_error(self, listener: Callable[[str], None]) -> None:
        super()._at_first_error(listener)
        self._each(lambda group: group._at_first_error(listener))

    def _first_cause(self) -> DistError | None:
        return next(filter(None, (group._first_cause() for group in self.inner_groups)), None)

    def _find_cause(self) -> DistError | None:
        return next(filter(None, (group._find_cause() for group in self.inner_groups)), None)

    def _number_begun(self) -> int:
        return sum(group._number_begun() for group in self.inner_groups)

    @contextmanager
    def _together(self) -> Iterator[None]:
        with ExitStack() as stack:
            for group in self.inner_groups:
                stack.enter_context(group._together())
            yield

    def _each(self, call: Callable[[ProcessGroup], None]) -> None:
        """Calls a function with every group; an error of one is raised after the others had their turn."""
        first: Exception | None = None
        for group in self.inner_groups:
            try:
                call(group)
            except Exception as error:  # noqa: BLE001, PERF203 - raised below
                first = first or error
        if first is not None:
            raise first

    def issue(self, call: Call) -> Work:
        """Issues a collective on the group that it is for; each of several by itself."""
        if call.operation is ALL_REDUCE_COALESCED:
            return self._all_reduce_coalesced(call)
        return self._forward(call.tensor, lambda group: group.issue(call))

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self._forward(tensor, lambda group: group._send(tensor, dst, tag))

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        return self._forward(tensor, lambda group: group._recv(tensor, src, tag))
