"""A cell: the part of a figure that is measured in one go, kept when it is done, and not measured again."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from collectives.bench.core.devices import Device

__all__ = ["Cell", "Measured", "Place", "slowest", "start"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank measures a cell.

    Attributes:
        rank: of this process among those that measure the cell.
        device: where tensors are.
        groups: the cell's groups by name; those of ``torch:NAME`` are torch's.
        barrier: lets all ranks of the cell go together; belongs to none of the groups.
        agree: returns rank 0's number on all ranks of the cell.
    """

    rank: int
    device: Device
    groups: Mapping[str, Any]
    barrier: Callable[[], None]
    agree: Callable[[int], int]


@dataclass(frozen=True)
class Cell(ABC):
    """What is measured in one go, by the same ranks.

    Attributes:
        panel: the part of the figure that it belongs to.
        ranks: number of ranks.
        device: type of the device.
    """

    panel: str
    ranks: int
    device: str

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that it needs, of all its ranks."""
        return ()

    @abstractmethod
    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:
        """Returns what one rank measured as plain values; called by all ranks of the cell.

        Args:
            place: where the rank is.
            budget_s: how long it should take, in seconds.
        """

    @abstractmethod
    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the samples to keep, of what :meth:`measure` returned on each rank."""

    def as_json(self) -> dict[str, Any]:
        """Returns kind and fields as plain values."""
        plain: dict[str, Any] = json.loads(json.dumps({"kind": type(self).__name__, **asdict(self)}))
        return plain


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell that is done.

    Attributes:
        cell: what :meth:`Cell.as_json` returned.
        samples: what :meth:`Cell.combine` returned.
    """

    cell: Mapping[str, Any]
    samples: Mapping[str, Any]


def slowest(ranks_ns: Sequence[Sequence[int]]) -> list[int]:
    """Returns, of each call, which rank took longest; the lists are by rank, then by call."""
    return [max(range(len(ranks_ns)), key=lambda rank: ranks_ns[rank][i]) for i in range(len(ranks_ns[0]))]


def start(place: Place) -> Any:
    """Returns the mark at which ranks begin together, with nothing under way on their devices."""
    place.device.starting(place.barrier)()
    return place.device.mark()
