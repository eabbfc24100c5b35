"""What was measured as text: a line for each series, medians and spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from collectives.bench.core.records import Column, Table
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.iterations import PHASES

__all__ = ["best_bucket_mb", "figure_tables", "usual_samples"]

WITHIN = 1.1
"""A total time so many times the best one counts as as good: all beyond is noise."""


def figure_tables(records: Sequence[Measured]) -> Iterator[Table]:
    """Yields the tables of a figure's cells, one for each kind."""
    for kind, (title, heads, rows) in _KINDS.items():
        chosen = [record for record in records if record.cell["kind"] == kind]
        if chosen:
            longest = max(len(record.cell["panel"]) for record in chosen)
            columns = [Column("panel", "", -max(longest, 5) - 1), Column("ranks", "", 6), *heads]
            cells = [
                [record.cell["panel"], str(record.cell["ranks"]), *row]
                for record in chosen
                for row in rows(record)
            ]
            yield Table(title, columns, cells)


def best_bucket_mb(records: Sequence[Measured]) -> dict[str, float]:
    """Returns, by backend, the MiB of an all-reduce from which larger ones gain no more, of figure 2."""
    found = {}
    for record in records:
        if record.cell["kind"] == "AllReduceSweep":
            totals = [float(np.median(calls)) for calls in record.samples["total_ns"]]
            enough = next(i for i, total in enumerate(totals) if total <= WITHIN * min(totals))
            found[record.cell["backend"]] = float(f"{record.cell['counts'][enough] * 4 / 2**20:.2g}")
    return found


def usual_samples(record: Measured, number: int) -> dict[str, list[int]]:
    """Returns a series of iterations, by phase, without those in which the wrapper was made anew."""
    times = record.samples["series"][number]
    rebuilt = set(times["rebuilt"])
    return {
        name: [value for i, value in enumerate(times[name]) if i not in rebuilt]
        for name in ("iteration", *PHASES)
    }


def _sweep_rows(record: Measured) -> Iterator[list[str]]:
    cell, samples = record.cell, record.samples
    for count, calls in zip(cell["counts"], samples["total_ns"], strict=True):
        yield [f"{count:,}", str(-(-cell["parameters"] // count)), *_spread(calls), str(samples["wrong"])]


def _ready_rows(record: Measured) -> Iterator[list[str]]:
    passes = record.samples["ready_ns"]
    number = len(passes[0])
    for part in (0.1, 0.25, 0.5, 0.75, 1.0):
        place = max(0, round(part * number) - 1)
        yield [str(place + 1), *_spread([times[place] for times in passes])]


def _iteration_rows(record: Measured) -> Iterator[list[str]]:
    for i, series in enumerate(record.cell["series"]):
        times = usual_samples(record, i)
        phases = [f"{np.median(times[name]) / 1e6:.2f}" for name in PHASES]
        yield [f"  {series['name']}", *_spread(times["iteration"]), *phases]


def _loss_rows(record: Measured) -> Iterator[list[str]]:
    losses = record.samples["losses"]
    last = max(1, len(losses) // 10)
    final = f"{np.mean(losses[-last:]):.3f}"
    yield [str(record.cell["interval"]), str(len(losses)), f"{losses[0]:.3f}", final]


def _spread(ns: Sequence[int]) -> list[str]:
    p10, median, p90 = np.percentile(ns, (10, 50, 90)) / 1e6
    return [str(len(ns)), f"{median:.2f}", f"{p10:.2f}", f"{p90:.2f}"]


_SPREAD = [
    Column("calls", "", 6),
    Column("median", "(ms)", 10),
    Column("p10", "(ms)", 10),
    Column("p90", "(ms)", 10),
]

_KINDS: Mapping[str, tuple[str, Sequence[Column], Callable[[Measured], Iterator[list[str]]]]] = {
    "AllReduceSweep": (
        "all-reduces",
        [Column("parameters", "", 12), Column("all-reduces", "", 12), *_SPREAD, Column("#wrong", "", 7)],
        _sweep_rows,
    ),
    "ReadyGradients": ("ready gradients", [Column("ready", "", 6), *_SPREAD], _ready_rows),
    "Iterations": (
        "iterations",
        [Column("  series", "", -25), *_SPREAD, *(Column(name, "(ms)", 14) for name in PHASES)],
        _iteration_rows,
    ),
    "Losses": (
        "losses",
        [
            Column("interval", "", 9),
            Column("iterations", "", 11),
            Column("first", "", 8),
            Column("last tenth", "", 11),
        ],
        _loss_rows,
    ),
}
"""Title, columns and rows by kind of cell."""
