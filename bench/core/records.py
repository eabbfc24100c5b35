"""The result record of every program; names of fields carry their units."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from collectives.bench.comparison.operations import bus_factor

__all__ = [
    "KINDS",
    "SCHEMA",
    "BaseReport",
    "Record",
    "Report",
    "Skipped",
    "Timing",
    "read_report",
    "write_json",
]

SCHEMA = 1
"""Version of the JSON form; grows when a field changes its meaning or goes."""

KINDS = ("cold", "hot", "loop")
"""Names of a record's times."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of calls, each the slowest rank's, in microseconds.

    Attributes:
        calls: how many were timed.
        median_us: median.
        p10_us: tenth percentile.
        p90_us: ninetieth percentile.
        min_us: shortest.
    """

    calls: int
    median_us: float
    p10_us: float
    p90_us: float
    min_us: float

    @classmethod
    def of(cls, ranks_ns: Sequence[Sequence[int]]) -> Timing:
        """Returns the statistics of calls.

        Args:
            ranks_ns: nanoseconds by rank, then by call; all ranks' lists have the same length.
        """
        slowest_us = np.asarray(ranks_ns, dtype=np.float64).max(axis=0) / 1e3
        p10, median, p90 = np.percentile(slowest_us, (10, 50, 90))
        return cls(slowest_us.size, float(median), float(p10), float(p90), float(slowest_us.min()))


@dataclass(frozen=True, slots=True)
class Record:
    """One peer at one size.

    Attributes:
        operation: name of the operation.
        peer: name of the backend, or of what else was measured.
        ranks: number of ranks.
        size_bytes: size of the whole array (:mod:`collectives.bench.comparison.operations`); 0 of a barrier.
        count_elements: number of its elements.
        dtype: its data type.
        redop: reduction.
        in_place: whether the user's tensor was reduced itself, else a copy of it, with the copy in the time.
        cold: calls on rewritten buffers in rotation.
        cold_wrong_elements: elements that were not as the formula says, over all cold calls and ranks.
        hot: calls on one buffer, again and again.
        hot_wrong_elements: the same for the hot calls' buffer.
        loop: calls without a barrier between, of which many went into one measurement; ``None`` for larger
            sizes.
        root: the rank that is special; -1 where none is.
        compared_as: the operation whose peers this one took turns with; the same as ``operation`` but for the
            memory limit, and so where it is empty.
        device: type of the device that the tensors were on.
    """

    operation: str
    peer: str
    ranks: int
    size_bytes: int
    count_elements: int
    dtype: str
    redop: str
    in_place: bool
    cold: Timing
    cold_wrong_elements: int
    hot: Timing
    hot_wrong_elements: int
    loop: Timing | None = None
    root: int = -1
    compared_as: str = ""
    device: str = "cpu"

    @property
    def question(self) -> str:
        """The operation that this belongs to a comparison of."""
        return self.compared_as or self.operation

    def timing(self, kind: str) -> Timing | None:
        """Returns one of the times by its name in :data:`KINDS`; ``None`` where it was not measured."""
        timing: Timing | None = getattr(self, kind)
        return timing

    def algbw_gb_per_s(self, timing: Timing) -> float:
        """Returns size over the median time, in 1e9 bytes a second."""
        return self.size_bytes / timing.median_us / 1e3

    def busbw_gb_per_s(self, timing: Timing) -> float | None:
        """Returns algorithm bandwidth times :func:`bus_factor`; ``None`` where nothing is communicated."""
        factor = bus_factor(self.operation, self.ranks)
        return None if factor is None else self.algbw_gb_per_s(timing) * factor

    @property
    def wrong_elements(self) -> int:
        """Wrong elements of all calls."""
        return self.cold_wrong_elements + self.hot_wrong_elements

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and the bandwidths as plain values."""
        plain = asdict(self)
        for name, timing in (("cold", self.cold), ("hot", self.hot)):
            plain[name]["algbw_gb_per_s"] = self.algbw_gb_per_s(timing)
            plain[name]["busbw_gb_per_s"] = self.busbw_gb_per_s(timing)
        return plain


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

    program: str
    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    records: list[_R] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return {
            "schema": SCHEMA,
            "program": self.program,
            "environment": dict(self.environment),
            "options": dict(self.options),
            "records": [self.record_as_json(record) for record in self.records],
            "skipped": [asdict(skipped) for skipped in self.skipped],
        }

    @abstractmethod
    def record_as_json(self, record: _R) -> dict[str, Any]:
        """Returns a record as plain values."""


class Report(BaseReport[Record]):
    """All that a comparison of peers found out."""

    __slots__ = ()

    def record_as_json(self, record: Record) -> dict[str, Any]:
        """Returns a record as plain values, with its bandwidths."""
        return record.as_json()


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Writes plain values to a file and makes its directory; NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(plain), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_report(path: Path) -> Report:
    """Returns the report in a JSON file.

    Raises:
        ValueError: the file has another schema.
    """
    plain = json.loads(path.read_text(encoding="utf-8"))
    if plain.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {plain.get('schema')!r}, but this version reads {SCHEMA}")
    return Report(
        plain["program"],
        plain["environment"],
        plain["options"],
        [_record(entry) for entry in plain["records"]],
        [Skipped(**entry) for entry in plain["skipped"]],
    )


def _record(plain: dict[str, Any]) -> Record:
    timings = {
        name: None if plain[name] is None else Timing(**{key: plain[name][key] for key in Timing.__slots__})
        for name in ("cold", "hot", "loop")
    }
    return Record(**{**plain, **timings})
