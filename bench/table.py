"""Reports as text, in the columns of nccl-tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.bench.records import Record, Report, Skipped, Timing
from collectives.bench.sizes import format_bytes

__all__ = ["comparison_lines", "header_lines", "record_lines", "report_lines", "skipped_lines"]

_COLUMNS = (
    # name, unit, width
    ("size", "(B)", 10),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("redop", "", 8),
    ("time", "(us)", 9),
    ("p10", "(us)", 9),
    ("p90", "(us)", 9),
    ("min", "(us)", 9),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 8),
    ("time", "(us)", 9),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 8),
    ("loop", "(us)", 9),
)
_COLD = slice(4, 11)
_HOT = slice(11, 15)


def header_lines(report: Report) -> list[str]:
    """Returns the program, the versions, the machine and the options."""
    machine, options = report.environment, dict(report.options)
    cache = machine["cache_last_level_bytes"]
    sizes = options.pop("sizes", ())
    if len(sizes) > 8:
        options["sizes"] = f"{sizes[0]} to {sizes[-1]} ({len(sizes)})"
    elif sizes:
        options["sizes"] = sizes
    versions = ", ".join(f"{name} {machine[name]}" for name in ("collectives", "torch", "numpy", "python"))
    where = [
        machine["host"],
        machine["cpu"],
        f"{machine['cores_usable']} of {machine['cores_online']} cores usable",
        f"last-level cache {format_bytes(cache) if cache else 'unknown'}",
        f"memory {machine['memory_bytes'] / 2**30:.0f} GiB",
        machine["architecture"],
        machine["system"],
        f"load {machine['load_average_1min']:.1f}",
    ]
    return [
        f"# {report.program}: {versions}",
        f"# machine: {', '.join(where)}",
        "# options: " + "; ".join(f"{name} {_plain(value)}" for name, value in options.items()),
    ]


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return "auto" if value is None else str(value)


def report_lines(report: Report) -> Iterator[str]:
    """Yields a table for each number of ranks and peer, then the peers side by side, then those skipped."""
    for ranks in sorted({record.ranks for record in report.records}):
        of_run = [record for record in report.records if record.ranks == ranks]
        for peer in dict.fromkeys(record.peer for record in of_run):
            yield ""
            yield from record_lines([record for record in of_run if record.peer == peer])
        yield ""
        yield from comparison_lines(of_run)
    if report.skipped:
        yield ""
        yield from skipped_lines(report.skipped)


def record_lines(records: Sequence[Record]) -> Iterator[str]:
    """Yields one peer's table.

    Args:
        records: of one peer and number of ranks, not empty.
    """
    first = records[0]
    how = "in-place" if first.in_place else "out-of-place (with the copy)"
    run = f"{_ranks(first.ranks)}, {how}"
    yield f"# {first.operation} by {first.peer}, {run}; slowest rank, median over calls"
    yield "#" + _over()
    yield "#" + "".join(name.rjust(width) for name, _, width in _COLUMNS)
    yield "#" + "".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    for record in records:
        yield " " + _row(_cells(record), [width for _, _, width in _COLUMNS])
    wrong = sum(record.wrong_elements for record in records)
    yield f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
    rates = [rate for record in records if (rate := record.busbw_gb_per_s(record.cold)) is not None]
    if rates:
        yield f"# Avg bus bandwidth    : {sum(rates) / len(rates):.4g}"


def _over() -> str:
    """Returns the line that names the groups of columns."""
    widths = [width for _, _, width in _COLUMNS]
    before, cold, hot = sum(widths[: _COLD.start]), sum(widths[_COLD]), sum(widths[_HOT])
    return (
        " " * (before + 2)
        + " cold: rewritten, rotated buffers ".center(cold - 2, "-")
        + "  "
        + " hot: same buffer ".center(hot - 2, "-")
    )


def _cells(record: Record) -> list[str]:
    cold, hot = record.cold, record.hot
    return [
        str(record.size_bytes),
        str(record.count_elements),
        record.dtype,
        record.redop if record.operation == "all_reduce" else "none",
        *(_number(value) for value in (cold.median_us, cold.p10_us, cold.p90_us, cold.min_us)),
        *_bandwidths(record, cold),
        str(record.cold_wrong_elements),
        _number(hot.median_us),
        *_bandwidths(record, hot),
        str(record.hot_wrong_elements),
        "-" if record.loop is None else _number(record.loop.median_us),
    ]


def _bandwidths(record: Record, timing: Timing) -> tuple[str, str]:
    bus = record.busbw_gb_per_s(timing)
    return f"{record.algbw_gb_per_s(timing):.2f}", "-" if bus is None else f"{bus:.2f}"


def _number(value: float) -> str:
    """Returns a duration with at least three digits and no more than two decimals."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def comparison_lines(records: Sequence[Record]) -> Iterator[str]:
    """Yields all peers side by side: cold medians, and how many times longer each takes than the first.

    Args:
        records: of one number of ranks.
    """
    peers = list(dict.fromkeys(record.peer for record in records))
    if len(peers) < 2:
        return
    first = peers[0]
    # What communicates nothing is there to be looked at, not to be compared with.
    others = [record.peer for record in records[1 : len(peers)] if record.operation == records[0].operation]
    times = {(record.size_bytes, record.peer): record.cold.median_us for record in records}
    ratios = [f"{peer}/{first}" for peer in others]
    widths = [max(12, len(name) + 2) for name in (*peers, *ratios)]
    yield f"# cold time (us) of each peer with {_ranks(records[0].ranks)}, then relative to {first}"
    yield "#" + "size (B)".rjust(10) + _row([*peers, *ratios], widths)
    for size in dict.fromkeys(record.size_bytes for record in records):
        cells = [_number(times[size, peer]) for peer in peers]
        cells += [f"{times[size, peer] / times[size, first]:.3g}x" for peer in others]
        yield str(size).rjust(11) + _row(cells, widths)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def skipped_lines(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yields why peers were not measured and what would add them."""
    for entry in skipped:
        run = "" if entry.ranks is None else f" with {_ranks(entry.ranks)}"
        yield f"# skipped {entry.peer}{run}: {entry.reason}"
        if entry.install and entry.install not in entry.reason:
            yield f"#   to add it: {entry.install}"
