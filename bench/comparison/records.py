"""The record of one peer at one operation and size, and the report of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from collectives.bench.comparison.operations import bus_factor
from collectives.bench.core.charts import made_with, write_image
from collectives.bench.core.records import BaseReport, Chart, Column, Curve, Table, Timing, curve_of
from collectives.bench.core.text import format_bytes, number_of_ranks, or_dash

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

    def tables(self) -> Sequence[Table]:
        """Returns a table of each peer, then the peers side by side, by number of ranks and operation."""
        runs: dict[tuple[int, str], list[Record]] = {}
        for record in sorted(self.records, key=lambda record: record.ranks):
            runs.setdefault((record.ranks, record.compared_at), []).append(record)
        versions = self.environment.get("peers", {})
        tables = []
        for records in runs.values():
            for peer in dict.fromkeys(record.peer for record in records):
                of_peer = [record for record in records if record.peer == peer]
                tables.append(_peer_table(of_peer, versions.get(peer, "")))
            tables += [table for kind in KINDS if (table := _comparison(records, kind)) is not None]
        return tables

    def reading(self) -> Sequence[str]:
        """Returns what the groups of columns are."""
        return ("cold: rewritten, rotated buffers; hot: same buffer.",)

    def charts(self) -> Sequence[Chart]:
        """Returns cold times and bus bandwidths over size, for each operation; a barrier has no size."""
        charts = []
        for operation in dict.fromkeys(record.compared_at for record in self.records if record.size_bytes):
            chosen = [record for record in self.records if record.compared_at == operation]
            runs = list(dict.fromkeys(record.ranks for record in chosen))
            ascending = sorted({record.size_bytes for record in chosen})
            names = {size: format_bytes(size) for size in ascending[:: -(-len(ascending) // MOST_NAMES)]}
            times, rates = [], []
            for color, peer in enumerate(dict.fromkeys(record.peer for record in chosen)):
                for ranks, look in zip(runs, cycle(_LOOKS)):
                    line = [one for one in chosen if (one.peer, one.ranks) == (peer, ranks)]
                    if not line:
                        continue
                    name = peer if len(runs) == 1 else f"{peer}, {number_of_ranks(ranks)}"
                    time = curve_of(name, ((one.size_bytes, one.cold) for one in line))
                    times.append(replace(time, look=look, color=color))
                    values = [one.busbw_gb_per_s(one.cold) or 0.0 for one in line]
                    if all(values):  # a peer that communicates nothing, or a single rank, has no bandwidth
                        rates.append(Curve(name, time.at, values, look=look, color=color))
            where = ", ".join([operation, *(map(number_of_ranks, runs) if len(runs) == 1 else ())])
            said = "time (us), slowest rank, median and p10 to p90"
            for y, curves in ((said, times), ("bus bandwidth (GB/s)", rates)):
                if curves:
                    charts.append(Chart(where, "size of each rank's tensor", y, curves, x_names=names))
        return charts


_LOOKS: tuple[Literal["line", "dashed", "dotted"], ...] = ("line", "dashed", "dotted")
"""Of curves by number of ranks."""

MOST_NAMES = 12
"""At most so many sizes are named on an axis."""


_COLUMNS: tuple[tuple[Column, Callable[[Record], str]], ...] = (
    (Column("size", "(B)", 10), lambda record: str(record.size_bytes)),
    (Column("count", "(elements)", 11), lambda record: str(record.count_elements)),
    (Column("type", "", 9), lambda record: record.dtype),
    (Column("redop", "", 8), lambda record: record.redop),
    (Column("root", "", 5), lambda record: str(record.root)),
    (Column("time", "(us)", 9, "cold"), lambda record: _time(record.cold.median_us)),
    (Column("p10", "(us)", 9, "cold"), lambda record: _time(record.cold.p10_us)),
    (Column("p90", "(us)", 9, "cold"), lambda record: _time(record.cold.p90_us)),
    (Column("min", "(us)", 9, "cold"), lambda record: _time(record.cold.min_us)),
    (Column("algbw", "(GB/s)", 8, "cold"), lambda record: or_dash(record.algbw_gb_per_s(record.cold), ".2f")),
    (Column("busbw", "(GB/s)", 8, "cold"), lambda record: or_dash(record.busbw_gb_per_s(record.cold), ".2f")),
    (Column("#wrong", "", 8, "cold"), lambda record: str(record.cold_wrong_elements)),
    (Column("time", "(us)", 9, "hot"), lambda record: _time(record.hot.median_us)),
    (Column("algbw", "(GB/s)", 8, "hot"), lambda record: or_dash(record.algbw_gb_per_s(record.hot), ".2f")),
    (Column("busbw", "(GB/s)", 8, "hot"), lambda record: or_dash(record.busbw_gb_per_s(record.hot), ".2f")),
    (Column("#wrong", "", 8, "hot"), lambda record: str(record.hot_wrong_elements)),
    (Column("loop", "(us)", 9), lambda record: _time(record.loop.median_us if record.loop else None)),
)
"""The columns of a peer's table, and the cell of a record in each."""


def _peer_table(records: Sequence[Record], version: str) -> Table:
    """Returns the table of one peer with one number of ranks, in the columns of nccl-tests."""
    first = records[0]
    run = number_of_ranks(first.ranks)
    if first.operation == "all_reduce":
        run += ", in-place" if first.in_place else ", out-of-place (with the copy)"
    name = f"{first.peer} ({version})" if version else first.peer
    wrong = sum(record.wrong_elements for record in records)
    notes = [f"Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"]
    rates = [rate for record in records if (rate := record.busbw_gb_per_s(record.cold)) is not None]
    if rates:
        notes.append(f"Avg bus bandwidth    : {sum(rates) / len(rates):.4g}")
    return Table(
        f"{first.operation} by {name}, {run}; slowest rank, median over calls",
        [column for column, _ in _COLUMNS],
        [[cell(record) for _, cell in _COLUMNS] for record in records],
        notes,
    )


def _comparison(records: Sequence[Record], kind: str) -> Table | None:
    """Returns the medians of all peers side by side, and over the first peer's; ``None`` for one peer.

    The limit is not a peer; its column shows the share of memory bandwidth reached: its time over the first
    peer's.
    """
    peers = list(dict.fromkeys(record.peer for record in records))
    first = peers[0]
    limits = [record.peer for record in records[: len(peers)] if record.operation != record.compared_at]
    others = [peer for peer in peers[1:] if peer not in limits]
    times = {
        (record.size_bytes, record.peer): timing.median_us
        for record in records
        if (timing := record.timing(kind)) is not None
    }
    if len(peers) < 2 or not times:
        return None
    ratios = [f"{peer}/{first}" for peer in others] + [f"of {limit}" for limit in limits]
    columns = [Column("size (B)", "", 10)]
    columns += [Column(name, "", max(12, len(name) + 2)) for name in (*peers, *ratios)]
    rows = []
    for size in dict.fromkeys(record.size_bytes for record in records):
        mine = times.get((size, first))
        if mine is not None:
            cells = [str(size), *(_time(times.get((size, peer))) for peer in peers)]
            cells += [_ratio(times.get((size, peer)), mine, "x") for peer in others]
            rows.append([*cells, *(_ratio(times.get((size, limit)), mine, "") for limit in limits)])
    return Table(
        f"{kind} time (us) of {records[0].compared_at}, each peer with "
        f"{number_of_ranks(records[0].ranks)}, then relative to {first}",
        columns,
        rows,
    )


def _time(us: float | None) -> str:
    """Returns a duration with at least three digits and no more than two decimals, a dash for none."""
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _ratio(value: float | None, over: float | None, unit: str) -> str:
    return "-" if value is None or over is None else f"{value / max(over, 1e-3):.3g}{unit}"


def _both(record: Record, first: Record, unit: str) -> str:
    cold = _ratio(record.cold.median_us, first.cold.median_us, unit)
    return f"{cold} / {_ratio(record.hot.median_us, first.hot.median_us, unit)}"


def brief_line(records: Sequence[Record]) -> str:
    """Returns one point in one line: each peer's cold and hot median, and the ratios to the first peer's.

    Args:
        records: of one number of ranks, operation and size, not empty.
    """
    first = records[0]
    cells = []
    for record in records:
        times = f"{_time(record.cold.median_us)} / {_time(record.hot.median_us)}"
        if record is first:
            ratio = ""
        elif record.operation == record.compared_at:
            ratio = f" ({_both(record, first, 'x')})"
        else:
            ratio = f" (reached {_both(record, first, '')})"
        wrong = f" {record.wrong_elements} WRONG" if record.wrong_elements else ""
        cells.append(f"{record.peer} {times}{ratio}{wrong}")
    where = f"{first.compared_at}, {number_of_ranks(first.ranks)}, {format_bytes(first.size_bytes)}"
    return f"{where.ljust(36)} us cold / hot: {'; '.join(cells)}"


def plot(report: Report, path: Path) -> None:
    """Writes the charts of a report as a PNG image.

    Args:
        report: with at least one record of an operation that has a size.
        path: of the image; its directory is made.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    first = report.records[0]
    what, about = "collectives", ""
    if all(record.compared_at == first.compared_at for record in report.records):
        what = first.compared_at
    if what == "all_reduce":
        about = f", {first.redop}, {'in place' if first.in_place else 'out of place'}"
    title = f"{what} of {first.dtype} tensors{about}; {made_with(report.environment, report.options)}"
    write_image(path, report.charts(), 2, title)
