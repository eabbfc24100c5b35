"""A group around a group that counts what a rank must send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from collectives.core.capabilities import Capabilities
from collectives.core.forwarding import ForwardingGroup
from collectives.core.operations import ALL_GATHER, ALL_GATHER_INTO_TENSOR, ALL_REDUCE, BROADCAST, Call
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work

__all__ = ["CountingGroup"]


class CountingGroup(ForwardingGroup):
    """Runs the operations of another group, and adds up the bytes that a rank sends in them at least.

    Of n ranks and a tensor of S bytes on each: an all-reduce sends ``2 (n - 1) / n S`` (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009), an all-gather and a
    broadcast ``(n - 1) S`` in all, which for an all-gather is each rank's part. Operations that no hook calls
    are not counted.

    Attributes:
        sent_bytes: that sum; may be set.

    Args:
        inner: the group; ended by its owner.
    """

    def __init__(self, inner: ProcessGroup) -> None:
        super().__init__(
            inner.rank(),
            inner.size(),
            timeout=inner.timeout,
            store=inner.get_group_store(),
            group_name=inner.group_name,
            group_desc=inner.group_desc,
        )
        self._inner = inner
        self.sent_bytes = 0.0

    @property
    def inner_groups(self) -> Sequence[ProcessGroup]:
        """The inner group."""
        return [self._inner]

    @property
    def capabilities(self) -> Capabilities:
        """What the inner group can do."""
        return self._inner.capabilities

    def name(self) -> str:
        """Returns the inner group's backend."""
        return self._inner.name()

    def _forward(self, tensor: torch.Tensor, issue: Callable[[ProcessGroup], Work]) -> Work:  # noqa: ARG002
        return issue(self._inner)

    def issue(self, call: Call) -> Work:
        """Counts what a collective sends, and issues it on the inner group."""
        factor = {
            ALL_REDUCE: 2 * (self._size - 1) / self._size,
            ALL_GATHER: self._size - 1,
            ALL_GATHER_INTO_TENSOR: self._size - 1,
            BROADCAST: self._size - 1 if call.root == self._rank else 0,
        }.get(call.operation, 0)
        self.sent_bytes += call.tensor.nbytes * factor if factor else 0
        return self._inner.issue(call)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        self.sent_bytes += tensor.nbytes
        return super()._send(tensor, dst, tag)

    def shutdown(self) -> None:
        """Does nothing: the inner group is its owner's."""
