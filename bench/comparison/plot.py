"""Plots of reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.bench.comparison.records import Record, Report
from collectives.bench.core.image import image, made_with
from collectives.bench.core.sizes import format_bytes

__all__ = ["plot"]

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
    whole = "\n".join([title or _title(report), made_with(report.environment)])
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
    every = -(-len(sizes) // 12)
    shown = sizes[::every]
    axes.set_xticks(shown, [format_bytes(size) for size in shown], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()
