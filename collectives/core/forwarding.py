"""Base of the groups that wrap others: a group whose operations run on inner groups of the same ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch

from collectives.core.backend_interface import HostCopy
from collectives.core.operations import ALL_REDUCE_COALESCED, Call
from collectives.core.process_group import ProcessGroup
from collectives.core.recording.flight_record import Totals, add_totals
from collectives.core.work import Work
from collectives.errors import DistError


def group_behind(group: object) -> ProcessGroup | None:
    """Returns the group of this package that ``group`` is, or that carries out torch's ``group``.

    ``None`` where there is none.
    """
    if isinstance(group, ProcessGroup):
        return group
    inner = getattr(group, "inner", None)
    return inner if isinstance(inner, ProcessGroup) else None


class _CheckedCopy(HostCopy):
    """A copy of an output of one group, which is good where none of the others is broken."""

    def __init__(self, inner: HostCopy, group: ForwardingGroup) -> None:
        self._inner = inner
        self._group = group

    def done(self) -> bool:
        return self._inner.done()

    def result(self) -> torch.Tensor:
        values = self._inner.result()
        self._group._raise_failure()
        return values


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
        first: one of the groups, whose ranks and time limit this one has.
        store: key/value store of the whole.
        group_name: name; ``None`` for that of ``first``.
        group_desc: free text; ``None`` for that of ``first``.
    """

    def __init__(
        self, first: ProcessGroup, store: Any, group_name: str | None = None, group_desc: str | None = None
    ) -> None:
        super().__init__(
            first.rank(),
            first.size(),
            timeout=first.timeout,
            store=store,
            group_name=first.group_name if group_name is None else group_name,
            group_desc=first.group_desc if group_desc is None else group_desc,
        )

    @property
    @abstractmethod
    def inner_groups(self) -> Sequence[ProcessGroup]:
        """The groups, each once."""

    @abstractmethod
    def _forward(self, tensor: torch.Tensor, issue: Callable[[ProcessGroup], Work]) -> Work:
        """Issues a collective or a message on the group that it is for.

        Args:
            tensor: one of its tensors; all are on one device.
            issue: issues it on a group.
        """

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
        return _CheckedCopy(self._group_for(tensor).to_host_later(tensor), self)

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

    def _first_cause(self) -> DistError | None:
        return next(filter(None, (group._first_cause() for group in self.inner_groups)), None)

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
