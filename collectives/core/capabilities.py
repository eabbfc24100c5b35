"""What a process group can do, in a form that can be asked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from collectives.core import operations
from collectives.core.types import ReduceOp

__all__ = ["OPERATIONS", "REDUCING", "Capabilities", "CapabilitiesByDevice", "by_device", "in_common"]

OPERATIONS = tuple(
    sorted({*(operation.offered_as for operation in operations.OPERATIONS), "recv", "recv_anysource", "send"})
)
"""Every operation by the name of its user function."""

REDUCING = frozenset(operation.name for operation in operations.OPERATIONS if operation.reduces)
"""The operations that compute."""


@dataclass(frozen=True)
class Capabilities:
    """Devices, operations, data types and reductions of a group.

    Attributes:
        devices: device types of the tensors it takes, such as ``{"cpu"}``.
        reductions: for each data type that can be reduced, the names of its reductions.
        operations: the operations offered, by the names in :data:`OPERATIONS`.
        moves: data types that operations without a reduction take; ``None`` for every one that torch can hold
            on the device.
        uneven: whether ``all_gather``, ``reduce_scatter`` and ``all_to_all`` take parts of different sizes.
        tags: whether ``tag`` matches sends with receives.
        refusals: for device types that this very group does not take, though others of its backend do, why.
    """

    devices: frozenset[str]
    reductions: Mapping[torch.dtype, frozenset[str]]
    operations: frozenset[str] = field(default=frozenset(OPERATIONS))
    moves: frozenset[torch.dtype] | None = None
    uneven: bool = True
    tags: bool = True
    refusals: Mapping[str, str] = field(default_factory=dict)

    def on(self, device: str) -> Capabilities:
        """Returns what holds for tensors on one device type.

        Args:
            device: the device type, such as ``"cpu"``.

        Raises:
            ValueError: tensors on it are not taken.
        """
        if device not in self.devices:
            raise ValueError(f"tensors on {device} are not taken, only on {', '.join(sorted(self.devices))}")
        return replace(self, devices=frozenset({device}), refusals={})

    def why_not(
        self,
        operation: str,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        op: ReduceOp | None = None,
    ) -> str | None:
        """Returns ``None`` where the operation is offered, else the reason, a clause without a full stop.

        Args:
            operation: a name of :data:`OPERATIONS`.
            device: device type of the tensors; not looked at when ``None``.
            dtype: data type of the tensors; not looked at when ``None``.
            op: the reduction, for the operations that reduce; not looked at when ``None``.

        Raises:
            ValueError: there is no such operation.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"unknown operation {operation!r}; the operations are {', '.join(OPERATIONS)}")
        if operation not in self.operations:
            return f"{operation} is not offered; offered are {', '.join(sorted(self.operations))}"
        if device is not None and device not in self.devices:
            reason = f"tensors on {device} are not taken, only on {', '.join(sorted(self.devices))}"
            return f"{reason}: {self.refusals[device]}" if device in self.refusals else reason
        if dtype is None:
            return None
        if operation not in REDUCING:
            if self.moves is not None and dtype not in self.moves:
                return f"{dtype} cannot be moved; {', '.join(sorted(map(str, self.moves)))} can"
            return None
        names = self.reductions.get(dtype)
        if names is None:
            return f"{dtype} cannot be reduced; {', '.join(sorted(map(str, self.reductions)))} can"
        if op is not None and op.name not in names:
            return f"{op.name} is not defined for {dtype}; {', '.join(sorted(names))} are"
        return None


@dataclass(frozen=True)
class CapabilitiesByDevice(Capabilities):
    """Capabilities that depend on the device type; made by :func:`by_device`.

    The inherited attributes tell what holds on every device type.

    Attributes:
        parts: the capabilities on each device type.
    """

    parts: Mapping[str, Capabilities] = field(default_factory=dict)

    def on(self, device: str) -> Capabilities:
        """Returns what holds for tensors on one device type."""
        return self.parts[device] if device in self.parts else super().on(device)

    def why_not(self, operation: str, *, device: str | None = None, **about: Any) -> str | None:
        """Asks the part of the device type; without one, every part."""
        if device is not None and device not in self.parts:
            return super().why_not(operation, device=device)
        asked = [device] if device is not None else list(self.parts)
        reasons = [self.parts[kind].why_not(operation, device=device, **about) for kind in asked]
        return next((reason for reason in reasons if reason is not None), None)


def in_common(parts: Sequence[Capabilities]) -> Capabilities:
    """Returns what holds for every one of several groups, on the device types that all of them take.

    Args:
        parts: at least one; what one of them states for single device types only is left out.
    """
    tables = [part.reductions for part in parts]
    limited = [part.moves for part in parts if part.moves is not None]
    return Capabilities(
        devices=frozenset.intersection(*(part.devices for part in parts)),
        reductions={
            dtype: frozenset.intersection(*(table[dtype] for table in tables))
            for dtype in tables[0]
            if all(dtype in table for table in tables)
        },
        operations=frozenset.intersection(*(part.operations for part in parts)),
        moves=frozenset.intersection(*limited) if limited else None,
        uneven=all(part.uneven for part in parts),
        tags=all(part.tags for part in parts),
    )


def by_device(parts: Mapping[str, Capabilities]) -> Capabilities:
    """Returns the capabilities of a group with a part for each device type.

    Args:
        parts: for each device type, what holds there.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    everywhere = in_common(list(parts.values()))
    return CapabilitiesByDevice(
        devices=frozenset(parts),
        reductions=everywhere.reductions,
        operations=everywhere.operations,
        moves=everywhere.moves,
        uneven=everywhere.uneven,
        tags=everywhere.tags,
        parts=dict(parts),
    )
