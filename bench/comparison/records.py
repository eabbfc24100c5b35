"""The record of one peer at one operation and size, and the report of a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.bench.comparison.operations import bus_factor
from collectives.bench.core.charts import Chart
from collectives.bench.core.records import SCHEMA, BaseReport, Skipped, Timing, curve_of
from collectives.bench.core.text import number_of_ranks

__all__ = ["KINDS", "Record", "Report", "read_report"]

KINDS = ("cold", "hot", "loop")
"""Names of a record's times."""


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
        compared_as: the operation whose peers this is compared with, where that is not ``operation``: of the
            memory limit.
        device: type of the device that the tensors were on.
        host: of the hot calls, until each returned; ``None`` where the device is done by then.
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
    host: Timing | None = None

    @property
    def compared_at(self) -> str:
        """The operation whose peers this is compared with."""
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


class Report(BaseReport[Record]):
    """All that a comparison of peers found out."""

    __slots__ = ()

    def record_as_json(self, record: Record) -> dict[str, Any]:
        """Returns a record as plain values, with its bandwidths."""
        return record.as_json()

    def charts(self) -> Sequence[Chart]:
        """Returns cold times over size, for each operation and number of ranks; a barrier has no size."""
        sized = [record for record in self.records if record.size_bytes]
        wheres = dict.fromkeys((record.compared_at, record.ranks) for record in sized)
        return [
            Chart(
                f"{operation}, {number_of_ranks(ranks)}",
                "size (bytes)",
                "time (us), slowest rank, median and p10 to p90",
                [
                    curve_of(peer, ((record.size_bytes, record.cold) for record in group))
                    for peer, group in _by_peer(
                        one for one in sized if (one.compared_at, one.ranks) == (operation, ranks)
                    ).items()
                ],
            )
            for operation, ranks in wheres
        ]


def _by_peer(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.peer, []).append(record)
    return groups


def read_report(path: Path) -> Report:
    """Returns the report in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or has another schema.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        schema = plain["schema"]
        if schema == SCHEMA:
            return Report(
                plain["program"],
                plain["environment"],
                plain["options"],
                [_record(entry) for entry in plain["records"]],
                [Skipped(**entry) for entry in plain["skipped"]],
            )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no report of collectives bench allreduce or collectives bench collectives: "
            f"{type(error).__name__}: {error}"
        ) from error
    raise ValueError(f"{path} has schema {schema!r}, but this version reads {SCHEMA}")


def _record(plain: dict[str, Any]) -> Record:
    timings = {
        name: Timing(**{key: plain[name][key] for key in Timing.__slots__})
        for name in ("cold", "hot", "loop", "host")
        if plain.get(name) is not None
    }
    return Record(**{**plain, **timings})
