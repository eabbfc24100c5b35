"""Reports as text, in the columns of nccl-tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from collectives.bench.core.records import KINDS, BaseReport, Record, Report, Skipped, Timing
from collectives.bench.core.sizes import format_bytes

__all__ = [
    "brief_line",
    "comparison_lines",
    "header_lines",
    "record_lines",
    "report_lines",
    "skipped_lines",
]

_COLUMNS = (
    # name, unit, width
    ("size", "(B)", 10),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("redop", "", 8),
    ("root", "", 5),
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
_COLD = slice(5, 12)
_HOT = slice(12, 16)


def header_lines(report: BaseReport[Any]) -> list[str]:
    """Returns the program, the versions, the machine and the options."""
    machine, options = report.environment, dict(report.options)
    cache = machine["cache_last_level_bytes"]
    sizes = options.pop("sizes", ())
    if len(sizes) > 8:
        options["sizes"] = f"{sizes[0]} to {sizes[-1]} ({len(sizes)})"
    elif sizes:
        options["sizes"] = sizes
    if options.get("link", "") is None:
        options["link"] = "unshaped"
    peers = "; ".join(f"{peer} is {version}" for peer, version in machine.get("peers", {}).items())
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
        *_gpu_lines(machine),
        *([f"# peers: {peers}"] if peers else []),
        "# options: " + "; ".join(f"{name} {_plain(value)}" for name, value in options.items()),
    ]


def _gpu_lines(machine: Mapping[str, Any]) -> Iterator[str]:
    """Yields the GPUs that tensors are on, and how ranks share them."""
    if "gpus" not in machine:
        return
    names = ", ".join(f"{number} x {name}" for name, number in Counter(machine["gpus"]).items())
    yield f"# gpus: {names}, driver {machine['gpu_driver']}, CUDA {machine['cuda']}"
    if "gpus_shared_by_ranks" in machine:
        runs = ",".join(map(str, machine["gpus_shared_by_ranks"]))
        words = " ".join(f"{name}={value}" for name, value in machine["gpus_shared_environment"].items())
        yield f"# ranks share gpus in runs of {runs} ranks, with {words}; that tells nothing of bandwidths"


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return "auto" if value is None else str(value)


def report_lines(report: Report) -> Iterator[str]:
    """Yields tables by number of ranks, operation and peer, the peers side by side, then those skipped."""
    for ranks in sorted({record.ranks for record in report.records}):
        of_run = [record for record in report.records if record.ranks == ranks]
        for operation in dict.fromkeys(record.question for record in of_run):
            compared = [record for record in of_run if record.question == operation]
            for peer in dict.fromkeys(record.peer for record in compared):
                yield ""
                yield from record_lines([record for record in compared if record.peer == peer])
            for kind in KINDS:
                yield from comparison_lines(compared, kind)
    if report.skipped:
        yield ""
        yield from skipped_lines(report.skipped)


def record_lines(records: Sequence[Record]) -> Iterator[str]:
    """Yields one peer's table.

    Args:
        records: of one peer and number of ranks, not empty.
    """
    first = records[0]
    run = _ranks(first.ranks)
    if first.operation == "all_reduce":
        run += ", in-place" if first.in_place else ", out-of-place (with the copy)"
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
        record.redop,
        str(record.root),
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


def comparison_lines(records: Sequence[Record], kind: str) -> Iterator[str]:
    """Yields all peers side by side: medians, and how many times longer each takes than the first.

    What communicates nothing is no peer to be faster than: of it the last column tells, which is its time
    over the first peer's, the fraction of the memory limit that the first peer reaches.

    Args:
        records: of one number of ranks and operation, not empty.
        kind: which time, a name of :data:`~collectives.bench.core.records.KINDS`.
    """
    peers = list(dict.fromkeys(record.peer for record in records))
    first = peers[0]
    limits = [record.peer for record in records[: len(peers)] if record.operation != record.question]
    others = [peer for peer in peers[1:] if peer not in limits]
    times = {
        (record.size_bytes, record.peer): timing.median_us
        for record in records
        if (timing := record.timing(kind)) is not None
    }
    if len(peers) < 2 or not times:
        return
    ratios = [f"{peer}/{first}" for peer in others] + [f"of {limit}" for limit in limits]
    widths = [max(12, len(name) + 2) for name in (*peers, *ratios)]
    yield ""
    yield (
        f"# {kind} time (us) of {records[0].question}, each peer with {_ranks(records[0].ranks)}, "
        f"then relative to {first}"
    )
    yield "#" + "size (B)".rjust(10) + _row([*peers, *ratios], widths)
    for size in dict.fromkeys(record.size_bytes for record in records):
        cells = [_time(times.get((size, peer))) for peer in peers]
        mine = times.get((size, first))
        cells += [_ratio(times.get((size, peer)), mine, "x") for peer in others]
        cells += [_ratio(times.get((size, limit)), mine, "") for limit in limits]
        if mine is not None:
            yield str(size).rjust(11) + _row(cells, widths)


def _time(value: float | None) -> str:
    return "-" if value is None else _number(value)


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
        times = f"{_number(record.cold.median_us)} / {_number(record.hot.median_us)}"
        if record is first:
            ratio = ""
        elif record.operation == record.question:
            ratio = f" ({_both(record, first, 'x')})"
        else:
            ratio = f" (reached {_both(record, first, '')})"
        wrong = f" {record.wrong_elements} WRONG" if record.wrong_elements else ""
        cells.append(f"{record.peer} {times}{ratio}{wrong}")
    where = f"{first.question}, {_ranks(first.ranks)}, {format_bytes(first.size_bytes)}"
    return f"{where.ljust(36)} us cold / hot: {'; '.join(cells)}"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def skipped_lines(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yields why peers were not measured and what would add them."""
    for entry in skipped:
        run = f" at {entry.operation}" if entry.operation else ""
        run += "" if entry.ranks is None else f" with {_ranks(entry.ranks)}"
        yield f"# skipped {entry.peer}{run}: {entry.reason}"
        if entry.install and entry.install not in entry.reason:
            yield f"#   to add it: {entry.install}"
