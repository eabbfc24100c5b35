"""The tables of a comparison, in the columns of nccl-tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from collectives.bench.comparison.records import KINDS, Record, Report
from collectives.bench.core.sizes import format_bytes
from collectives.bench.core.text import Column, number_of_ranks, or_dash, skipped_lines, table_lines

__all__ = ["brief_line", "comparison_lines", "record_lines", "report_lines"]

_COLUMNS: tuple[tuple[str, str, int, Callable[[Record], str]], ...] = (
    ("size", "(B)", 10, lambda record: str(record.size_bytes)),
    ("count", "(elements)", 11, lambda record: str(record.count_elements)),
    ("type", "", 9, lambda record: record.dtype),
    ("redop", "", 8, lambda record: record.redop),
    ("root", "", 5, lambda record: str(record.root)),
    ("time", "(us)", 9, lambda record: _time(record.cold.median_us)),
    ("p10", "(us)", 9, lambda record: _time(record.cold.p10_us)),
    ("p90", "(us)", 9, lambda record: _time(record.cold.p90_us)),
    ("min", "(us)", 9, lambda record: _time(record.cold.min_us)),
    ("algbw", "(GB/s)", 8, lambda record: or_dash(record.algbw_gb_per_s(record.cold), ".2f")),
    ("busbw", "(GB/s)", 8, lambda record: or_dash(record.busbw_gb_per_s(record.cold), ".2f")),
    ("#wrong", "", 8, lambda record: str(record.cold_wrong_elements)),
    ("time", "(us)", 9, lambda record: _time(record.hot.median_us)),
    ("algbw", "(GB/s)", 8, lambda record: or_dash(record.algbw_gb_per_s(record.hot), ".2f")),
    ("busbw", "(GB/s)", 8, lambda record: or_dash(record.busbw_gb_per_s(record.hot), ".2f")),
    ("#wrong", "", 8, lambda record: str(record.hot_wrong_elements)),
    ("loop", "(us)", 9, lambda record: _time(record.loop.median_us if record.loop else None)),
)
"""The columns of a peer's table: name, unit, width, and the cell of a record."""

_COLD = slice(5, 12)
_HOT = slice(12, 16)


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
    rows = ([cell(record) for *_, cell in _COLUMNS] for record in records)
    yield from table_lines([(name, unit, width) for name, unit, width, _ in _COLUMNS], rows)
    wrong = sum(record.wrong_elements for record in records)
    yield f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
    rates = [rate for record in records if (rate := record.busbw_gb_per_s(record.cold)) is not None]
    if rates:
        yield f"# Avg bus bandwidth    : {sum(rates) / len(rates):.4g}"


def _groups_of_columns() -> str:
    """Returns the line that names the groups of columns."""
    widths = [width for _, _, width, _ in _COLUMNS]
    before, cold, hot = sum(widths[: _COLD.start]), sum(widths[_COLD]), sum(widths[_HOT])
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
    columns: list[Column] = [("size (B)", "", 10)]
    columns += [(name, "", max(12, len(name) + 2)) for name in (*peers, *ratios)]
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
