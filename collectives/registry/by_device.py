"""A group with a backend for each device type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from collectives.core.capabilities import Capabilities, by_device
from collectives.core.forwarding import ForwardingGroup
from collectives.core.operations import ALL_REDUCE_COALESCED, BARRIER, Call
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work
from collectives.store import PrefixStore


class ProcessGroupByDevice(ForwardingGroup):
    """Runs each operation on the group of its tensors' device type.

    All groups have the same ranks in the same order. Operations of different device types are not ordered
    among each other. A barrier runs on the group of its device, without one on that of the first device type.

    Args:
        groups: a group for each device type; one group may serve several.
        store: key/value store of the whole.

    Raises:
        ValueError: the groups differ in rank or size, or one does not take tensors of its device type.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup], store: Any = None) -> None:
        self._groups = dict(groups)
        first = next(iter(self._groups.values()))
        self._capabilities = by_device(
            {device: group.capabilities.on(device) for device, group in self._groups.items()}
        )
        super().__init__(list(self._groups.values()), store)
        self._first = first
        self._cpu = self._groups.get("cpu")

    @property
    def groups(self) -> dict[str, ProcessGroup]:
        """The group of each device type."""
        return dict(self._groups)

    @property
    def capabilities(self) -> Capabilities:
        """What the groups can do, each for its device type."""
        return self._capabilities

    def name(self) -> str:
        """Returns the backend of each device type."""
        return ",".join(f"{device}:{group.name()}" for device, group in self._groups.items())

    def _store_for(self, number: int, store: Any) -> Any:
        return PrefixStore(self.inner_groups[number].name(), store)

    # The fast path is the CPU's.

    def fast_collective(self, opcode: int, *args: Any, **kwargs: Any) -> Work | None:
        """Issues a collective where the CPU's group takes the fast path; no barrier of another group."""
        cpu = self._cpu
        if cpu is None or (opcode == BARRIER.opcode and cpu is not self._first):
            return None
        return cpu.fast_collective(opcode, *args, **kwargs)

    def fast_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, async_op: bool = False
    ) -> Work | None:
        """Sends or receives a tensor where the CPU's group takes the fast path."""
        return None if self._cpu is None else self._cpu.fast_message(sends, tensor, peer, tag, async_op)

    def _group_for(self, tensor: torch.Tensor) -> ProcessGroup:
        return self._groups[tensor.device.type]

    def issue(self, call: Call) -> Work:
        """Gives a barrier to the group of its device, else to that of the first device type.

        Several tensors go to one group as a whole where all are of its device type.
        """
        if call.operation is BARRIER:
            kind = call.device.type if isinstance(call.device, torch.device) else ""
            return self._groups.get(kind, self._first).issue(call)
        if call.operation is ALL_REDUCE_COALESCED and len({one.device.type for one in call.outputs}) == 1:
            return self._group_for(call.tensor).issue(call)
        return super().issue(call)
