"""What the reports of all programs consist of; names of fields carry their units."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

__all__ = [
    "BaseReport",
    "Chart",
    "Curve",
    "Skipped",
    "Table",
    "Timing",
    "curve_of",
    "write_json",
]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one peer.

    Attributes:
        name: in the legend; empty for none.
        at: where the values are: numbers, or names of bars.
        values: as many.
        low: lower ends of their spread; empty where there is none.
        high: upper ends, likewise.
        look: a line (solid, dashed or dotted), which is bars where it is at names; points alone; or a
            box for all values at a name, with their mean where the curve has a name.
        color: its number among the colours; ``None`` for the curve's place in the chart.
    """

    name: str
    at: Sequence[float] | Sequence[str]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    look: Literal["solid", "dash", "dot", "points", "boxes"] = "solid"
    color: int | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with common axes; bars where they are at names.

    Attributes:
        title: above it.
        x: quantity and unit of the horizontal axis; may be empty for bars.
        y: of the vertical axis.
        curves: in the order of the legend.
        log: letters of the logarithmic axes; where there are names, none is.
        x_names: what stands at places of the horizontal axis, where that is not the number.
        stacked: whether bars stand on one another.
        from_zero: whether the vertical axis begins there; bars always do.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log: Literal["xy", "x", ""] = "xy"
    x_names: Mapping[int, str] = field(default_factory=dict)
    stacked: bool = False
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of calls, each the slowest rank's, in microseconds.

    Attributes:
        calls: how many were timed.
        median_us: median.
        p10_us: tenth percentile.
        p90_us: ninetieth percentile.
        min_us: shortest.
        mean_us: arithmetic mean, which rare long calls show in.
    """

    calls: int
    median_us: float
    p10_us: float
    p90_us: float
    min_us: float
    mean_us: float

    @classmethod
    def of(cls, ranks_ns: Sequence[Sequence[int]]) -> Timing:
        """Returns the statistics of calls.

        Args:
            ranks_ns: nanoseconds by rank, then by call; all ranks' lists have the same length.
        """
        slowest_us = np.asarray(ranks_ns, dtype=np.float64).max(axis=0) / 1e3
        p10, median, p90 = np.percentile(slowest_us, (10, 50, 90))
        ends = float(slowest_us.min()), float(slowest_us.mean())
        return cls(slowest_us.size, float(median), float(p10), float(p90), *ends)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A peer that was not measured.

    Attributes:
        peer: its name.
        reason: why.
        install: the command that would add it; empty where none would.
        ranks: number of ranks of the run; ``None`` for all runs.
        operation: the only operation that it was not measured at; empty for all.
    """

    peer: str
    reason: str
    install: str = ""
    ranks: int | None = None
    operation: str = ""


_T = TypeVar("_T")
_K = TypeVar("_K")


def grouped(records: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Returns records by what a function says of each, both in their order."""
    found: dict[_K, list[_T]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def usable(
    peers: Iterable[_T], why_not: Callable[[_T], tuple[str | None, str]], skipped: list[Skipped]
) -> list[_T]:
    """Returns the peers that can be measured here, and adds the others to those that are skipped.

    Args:
        peers: whatever has a name by ``str``.
        why_not: returns why one cannot be measured, ``None`` where it can, and the command that would add it.
        skipped: of the report.
    """
    found = []
    for peer in peers:
        reason, install = why_not(peer)
        if reason is None:
            found.append(peer)
        else:
            skipped.append(Skipped(str(peer), reason, install))
    return found


def curve_of(name: str, points: Iterable[tuple[float | str, Timing]], unit_us: float = 1.0) -> Curve:
    """Returns medians as a curve, with the percentiles as their spread.

    Args:
        name: in the legend.
        points: where each time belongs.
        unit_us: microseconds of the unit that is shown.
    """
    at, times = zip(*points, strict=True)
    values, low, high = (
        [getattr(time, quantile) / unit_us for time in times]
        for quantile in ("median_us", "p10_us", "p90_us")
    )
    return Curve(name, at, values, low, high)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report, for text and for a page.

    Attributes:
        heading: what it shows.
        columns: name and unit of each, which may have several lines.
        rows: a cell for each column.
        notes: lines below it.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


_R = TypeVar("_R")


@dataclass(slots=True)
class BaseReport(ABC, Generic[_R]):
    """All that a program found out, in records of one kind.

    Attributes:
        program: its name.
        environment: machine and versions.
        options: what the program was asked to do.
        records: measurements, in order.
        skipped: peers that were not measured.
    """

    SCHEMA: ClassVar[int] = 1
    """Version of the JSON form of a program; grows when a field changes its meaning or goes."""

    program: str
    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    records: list[_R] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return {
            "schema": self.SCHEMA,
            "program": self.program,
            "environment": dict(self.environment),
            "options": dict(self.options),
            "records": [self.record_as_json(record) for record in self.records],
            "skipped": [asdict(skipped) for skipped in self.skipped],
        }

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Returns the tables."""

    def reading(self) -> Sequence[str]:
        """Returns how to read the tables, in lines; none where that needs no words."""
        return ()

    def charts(self) -> Sequence[Chart]:
        """Returns what a page shows as curves or bars; none where the table says it all."""
        return ()

    def record_as_json(self, record: _R) -> dict[str, Any]:
        """Returns a record as plain values.

        Args:
            record: one of :attr:`records`, a dataclass.
        """
        return asdict(record)  # type: ignore[call-overload, no-any-return]


def write_json(path: Path, plain: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Writes plain values to a file and makes its directory; NaN and infinities become null.

    Args:
        path: the file; what it held is lost.
        plain: numbers, text, lists and mappings of such.
        indent: spaces before what is within something else; ``None`` for all in a line, as of many numbers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(plain), indent=indent, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
