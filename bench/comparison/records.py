"""The record of one peer at one operation and size, and the report of a comparison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.bench.comparison.operations import bus_factor
from collectives.bench.core.image import image, made_with
from collectives.bench.core.records import (
    SCHEMA,
    BaseReport,
    Chart,
    Column,
    Skipped,
    Table,
    Timing,
    curve_of,
)
from collectives.bench.core.text import (
    format_bytes,
    number_of_ranks,
    or_dash,
    skipped_lines,
    table_lines,
)

__all__ = [
    "KINDS",
    "Record",
    "Report",
    "brief_line",
    "comparison_lines",
    "plot",
    "read_report",
    "record_lines",
    "report_lines",
]

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
        """Returns a table of all peers for each operation and number of ranks."""
        tables = []
        for operation, ranks in dict.fromkeys((record.compared_at, record.ranks) for record in self.records):
            chosen = [one for one in self.records if (one.compared_at, one.ranks) == (operation, ranks)]
            heading = f"{operation}, {number_of_ranks(ranks)}; slowest rank, median over calls"
            columns = [Column("peer", "", 0), *(column for column, _ in _COLUMNS)]
            tables.append(
                Table(heading, columns, [[one.peer, *(cell(one) for _, cell in _COLUMNS)] for one in chosen])
            )
        return tables

    def charts(self) -> Sequence[Chart]:
        """Returns cold times over size, for each operation and number of ranks; a barrier has no size."""
        sized = [record for record in self.records if record.size_bytes]
        wheres = dict.fromkeys((record.compared_at, record.ranks) for record in sized)
        return [
            Chart(
                f"{operation}, {number_of_ranks(ranks)}",
                "size",
                "time (us), slowest rank, median and p10 to p90",
                [
                    curve_of(peer, ((record.size_bytes, record.cold) for record in group))
                    for peer, group in _by_peer(
                        one for one in sized if (one.compared_at, one.ranks) == (operation, ranks)
                    ).items()
                ],
                x_names=_size_names({one.size_bytes for one in sized if one.compared_at == operation}),
            )
            for operation, ranks in wheres
        ]


def _size_names(sizes: Iterable[int]) -> dict[int, str]:
    """Returns what stands at sizes on an axis: at a dozen of them at most."""
    ascending = sorted(sizes)
    return {size: format_bytes(size) for size in ascending[:: -(-len(ascending) // 12)]}


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


def report_lines(report: Report) -> Iterator[str]:
    """Yields tables by number of ranks, operation and peer, the peers side by side, then those skipped."""
    versions: Mapping[str, str] = report.environment.get("peers", {})
    for ranks in sorted({record.ranks for record in report.records}):
        of_run = [record for record in report.records if record.ranks == ranks]
        for operation in dict.fromkeys(record.compared_at for record in of_run):
            compared = [record for record in of_run if record.compared_at == operation]
            for peer in dict.fromkeys(record.peer for record in compared):
                yield ""
                of_peer = [record for record in compared if record.peer == peer]
                yield from record_lines(of_peer, versions.get(peer, ""))
            for kind in KINDS:
                yield from comparison_lines(compared, kind)
    if report.skipped:
        yield ""
        yield from skipped_lines(report.skipped)


def record_lines(records: Sequence[Record], version: str = "") -> Iterator[str]:
    """Yields one peer's table.

    Args:
        records: of one peer and number of ranks, not empty.
        version: of the software behind the peer.
    """
    first = records[0]
    run = number_of_ranks(first.ranks)
    if first.operation == "all_reduce":
        run += ", in-place" if first.in_place else ", out-of-place (with the copy)"
    name = f"{first.peer} ({version})" if version else first.peer
    yield f"# {first.operation} by {name}, {run}; slowest rank, median over calls"
    yield "#" + _groups_of_columns()
    rows = ([cell(record) for _, cell in _COLUMNS] for record in records)
    yield from table_lines([column for column, _ in _COLUMNS], rows)
    wrong = sum(record.wrong_elements for record in records)
    yield f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
    rates = [rate for record in records if (rate := record.busbw_gb_per_s(record.cold)) is not None]
    if rates:
        yield f"# Avg bus bandwidth    : {sum(rates) / len(rates):.4g}"


def _groups_of_columns() -> str:
    """Returns the line that names the groups of columns."""
    widths: Counter[str] = Counter()
    for column, _ in _COLUMNS[:-1]:
        widths[column.group] += column.width
    before, cold, hot = widths[""], widths["cold"], widths["hot"]
    return (
        " " * (before + 2)
        + " cold: rewritten, rotated buffers ".center(cold - 2, "-")
        + "  "
        + " hot: same buffer ".center(hot - 2, "-")
    )


def comparison_lines(records: Sequence[Record], kind: str) -> Iterator[str]:
    """Yields all peers side by side: medians, and each peer's time over the first peer's.

    The limit is not a peer; its column shows the share of memory bandwidth reached: its time over the first
    peer's.

    Args:
        records: of one number of ranks and operation, not empty.
        kind: which time, a name of :data:`~collectives.bench.core.records.KINDS`.
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
        return
    ratios = [f"{peer}/{first}" for peer in others] + [f"of {limit}" for limit in limits]
    columns = [Column("size (B)", "", 10)]
    columns += [Column(name, "", max(12, len(name) + 2)) for name in (*peers, *ratios)]
    yield ""
    yield (
        f"# {kind} time (us) of {records[0].compared_at}, each peer with "
        f"{number_of_ranks(records[0].ranks)}, then relative to {first}"
    )
    rows = []
    for size in dict.fromkeys(record.size_bytes for record in records):
        mine = times.get((size, first))
        if mine is not None:
            cells = [str(size), *(_time(times.get((size, peer))) for peer in peers)]
            cells += [_ratio(times.get((size, peer)), mine, "x") for peer in others]
            rows.append([*cells, *(_ratio(times.get((size, limit)), mine, "") for limit in limits)])
    yield from table_lines(columns, rows)


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


_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX*"


def plot(report: Report, path: Path, title: str = "") -> None:
    """Writes a PNG image: time over size, and bus bandwidth over size, for every peer and number of ranks.

    Each operation has its own pair of plots; a barrier has no size and none. Lines are cold medians; the
    bands reach from the tenth to the ninetieth percentile.

    Args:
        report: with at least one record of an operation that has a size.
        path: of the image; its directory is made.
        title: above the plots; the default names operation, data type and reduction.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    operations = list(dict.fromkeys(record.compared_at for record in report.records if record.size_bytes))
    whole = "\n".join([title or _title(report), made_with(report.environment, report.options)])
    with image(path, len(operations), 2, (6.5, 5.2), whole) as grid:
        for operation, axes in zip(operations, grid, strict=True):
            chosen = [record for record in report.records if record.compared_at == operation]
            _draw_operation(axes[0], axes[1], chosen)
            if len(operations) > 1:
                axes[0].set_title(operation)


def _draw_operation(time_axes: Any, rate_axes: Any, records: Sequence[Record]) -> None:
    """Draws the records of one operation into its two plots."""
    runs = sorted({record.ranks for record in records})
    for i, peer in enumerate(dict.fromkeys(record.peer for record in records)):
        for j, ranks in enumerate(runs):
            line = [record for record in records if (record.peer, record.ranks) == (peer, ranks)]
            look = {
                "color": f"C{i % 10}",
                "linestyle": _STYLES[j % len(_STYLES)],
                "marker": _MARKERS[i % len(_MARKERS)],
                "markersize": 4,
            }
            _draw(time_axes, rate_axes, line, look)
    sizes = sorted({record.size_bytes for record in records})
    _finish(time_axes, "time (us), slowest rank, median and p10 to p90", sizes)
    _finish(rate_axes, "bus bandwidth (GB/s)", sizes)


def _title(report: Report) -> str:
    first = report.records[0]
    if any(record.compared_at != first.compared_at for record in report.records):
        return f"collectives of {first.dtype} tensors"
    if first.compared_at != "all_reduce":
        return f"{first.compared_at} of {first.dtype} tensors"
    place = "in place" if first.in_place else "out of place"
    return f"all_reduce of {first.dtype} tensors, {first.redop}, {place}"


def _draw(time_axes: Any, rate_axes: Any, line: Sequence[Record], look: dict[str, Any]) -> None:
    """Draws the records of one peer and number of ranks, ascending in size, into both plots."""
    if not line:
        return
    sizes = [record.size_bytes for record in line]
    label = f"{line[0].peer}, {line[0].ranks} {'rank' if line[0].ranks == 1 else 'ranks'}"
    time_axes.plot(sizes, [record.cold.median_us for record in line], label=label, **look)
    time_axes.fill_between(
        sizes,
        [record.cold.p10_us for record in line],
        [record.cold.p90_us for record in line],
        color=look["color"],
        alpha=0.15,
        linewidth=0,
    )
    rates = [record.busbw_gb_per_s(record.cold) for record in line]
    if all(rates):  # a peer that communicates nothing, or a single rank, has no bus bandwidth
        rate_axes.plot(sizes, rates, label=label, **look)


def _finish(axes: Any, quantity: str, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size of each rank's tensor")
    axes.set_ylabel(quantity)
    names = _size_names(sizes)
    axes.set_xticks([*names], [*names.values()], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()
