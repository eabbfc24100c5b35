"""The figures as charts, with the paper's axes, and as images of them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from collectives.bench.core import image
from collectives.bench.core.records import Chart, Curve
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.iterations import PHASES
from collectives.bench.paper.tables import usual_samples

__all__ = ["draw", "figure_charts"]

TITLE_WIDTH = 50
"""Characters of the title over each panel of a row."""

COLUMNS = 4
"""Most panels in a row."""

CUTOFF = 0.05
"""Of figure 11's filter, as part of half the sampling rate."""

FILTER_ORDER = 3


def figure_charts(name: str, records: Sequence[Measured]) -> list[Chart]:
    """Returns the panels of a figure.

    Args:
        name: of the figure.
        records: its cells.

    Raises:
        ModuleNotFoundError: scipy is not installed, which figure 11 needs.
    """
    panels: dict[str, list[Measured]] = {}
    for record in records:
        panels.setdefault(_panel(name, record), []).append(record)
    if name == "fig9":  # each backend's line begins with the iteration of one rank
        panels = _with_local(panels)
    return [_CHARTS[name](panel, chosen) for panel, chosen in panels.items()]


def draw(
    name: str,
    charts: Sequence[Chart],
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    path: Path,
) -> None:
    """Writes a figure as a PNG image.

    Args:
        name: of the figure.
        charts: those of :func:`figure_charts`, at least one.
        environment: of the report.
        options: of the report.
        path: of the image; its directory is made.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    columns = _columns([chart.title.split(",")[0] for chart in charts])
    rows = -(-len(charts) // columns)
    about = f"{_TITLES[name]}. {image.made_with(environment, options)}"
    title = "\n".join(textwrap.wrap(about, TITLE_WIDTH * columns))
    with image.image(path, rows, columns, (4.6, 4.0), title) as grid:
        for axes in grid.flat[len(charts) :]:
            axes.set_axis_off()
        for chart, axes in zip(charts, grid.flat, strict=False):
            axes.set_title(chart.title, fontsize=9)
            image.draw(axes, chart)
            if chart.stacked:
                axes.legend(fontsize=7, loc="upper center", ncols=2)
            elif axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7)


def _columns(firsts: Sequence[str]) -> int:
    """Returns how many panels stand in a row: those of a model, where each has as many.

    Args:
        firsts: the first words of each panel's name.
    """
    each = {firsts.count(first) for first in firsts}
    of_model = each.pop() if len(each) == 1 else 1
    return of_model if 1 < of_model <= COLUMNS else min(COLUMNS, len(firsts))


def _panel(name: str, record: Measured) -> str:
    cell = record.cell
    if cell["kind"] == "AllReduceSweep":  # all backends in one
        return f"{cell['panel'][:3]} all-reduces of {cell['parameters'] / 1e6:g} M parameters in all"
    if name in {"fig6", "fig7", "fig8"}:
        return f"{cell['panel']}, {cell['ranks']} ranks"
    return str(cell["panel"])


def _with_local(panels: Mapping[str, list[Measured]]) -> dict[str, list[Measured]]:
    local = {panel: found for panel, found in panels.items() if found[0].cell["ranks"] == 1}
    return {
        panel: [*local.get(found[0].cell["model"], ()), *found]
        for panel, found in panels.items()
        if panel not in local
    } or dict(panels)


def _bucketing(panel: str, records: Sequence[Measured]) -> Chart:
    if records[0].cell["kind"] == "AllReduceSweep":
        curves = [
            _curve(record.cell["backend"], record.cell["counts"], record.samples["total_ns"])
            for record in records
        ]
        return Chart(panel, "parameters per all-reduce", "total time (s)", curves)
    passes = records[0].samples["ready_ns"]
    gradients = range(1, len(passes[0]) + 1)
    curve = _curve(f"median of {len(passes)} passes, p10 to p90", gradients, [*zip(*passes, strict=True)])
    return Chart(panel, "ready gradients", "time since backward began (s)", [curve], log="")


def _breakdown(panel: str, records: Sequence[Measured]) -> Chart:
    names = [series["name"] for series in records[0].cell["series"]]
    bars = [usual_samples(records[0], i) for i in range(len(names))]
    medians = np.array([[np.median(times[phase]) for phase in PHASES] for times in bars])
    medians /= medians[names.index("no overlap")].sum()
    curves = [
        Curve(_PHASE_NAMES[phase], names, heights.tolist())
        for phase, heights in zip(PHASES, medians.T, strict=True)
    ]
    return Chart(panel, "", "time of an iteration (no overlap = 1)", curves, log="", stacked=True)


def _buckets(panel: str, records: Sequence[Measured]) -> Chart:
    """Returns a box for each bucket size, and the iterations that it leaves out."""
    names = [f"{series['bucket_mb']:g}" for series in records[0].cell["series"]]
    usual = [(name, ns) for i, name in enumerate(names) for ns in usual_samples(records[0], i)["iteration"]]
    rebuilt = [
        (name, times["iteration"][place])
        for name, times in zip(names, records[0].samples["series"], strict=True)
        for place in times["rebuilt"]
    ]
    curves = [
        Curve("", [name for name, _ in usual], [ns / 1e9 for _, ns in usual], look="boxes"),
        Curve(
            "wrapper made anew",
            [name for name, _ in rebuilt],
            [ns / 1e9 for _, ns in rebuilt],
            look="points",
            color=3,
        ),
    ]
    return Chart(panel, "bucket size (MB)", "latency of an iteration (s)", curves, log="")


def _scaling(panel: str, records: Sequence[Measured]) -> Chart:
    ranks = [record.cell["ranks"] for record in records]
    curves = [_curve("measured", ranks, [usual_samples(record, 0)["iteration"] for record in records])]
    return replace(_over_ranks(panel, ranks, "latency of an iteration (s)", curves), from_zero=True)


def _intervals(panel: str, records: Sequence[Measured]) -> Chart:
    """Returns boxes with their means, which skipped synchronisations lower; medians would show none."""
    ordered = sorted(records, key=lambda record: int(record.cell["ranks"]))
    curves = []
    for i, series in enumerate(records[0].cell["series"]):
        taken = [(str(one.cell["ranks"]), ns) for one in ordered for ns in usual_samples(one, i)["iteration"]]
        curves.append(
            Curve(series["name"], [ranks for ranks, _ in taken], [ns / 1e9 for _, ns in taken], look="boxes")
        )
    return Chart(panel, "ranks", "latency of an iteration (s); triangle: mean", curves, log="")


def _losses(panel: str, records: Sequence[Measured]) -> Chart:
    from scipy.signal import butter, filtfilt

    curves = []
    for i, record in enumerate(records):
        losses = record.samples["losses"]
        iterations = range(1, len(losses) + 1)
        padding = min(3 * (FILTER_ORDER + 1), len(losses) - 1)
        smooth = filtfilt(*butter(FILTER_ORDER, CUTOFF), losses, padlen=padding).tolist()
        curves += [
            Curve("", iterations, losses, look="points", color=i),
            Curve(f"synchronised every {record.cell['interval']}", iterations, smooth, color=i),
        ]
    return Chart(panel, "iteration", "loss", curves, log="")


def _lanes(panel: str, records: Sequence[Measured]) -> Chart:
    ranks = [record.cell["ranks"] for record in records]
    curves = [
        _curve(series["name"], ranks, [usual_samples(record, i)["iteration"] for record in records])
        for i, series in enumerate(records[0].cell["series"])
    ]
    return _over_ranks(panel, ranks, "latency of an iteration (s)", curves)


def _over_ranks(panel: str, ranks: Sequence[int], y: str, curves: Sequence[Curve]) -> Chart:
    names = {number: "local" if number == 1 else str(number) for number in sorted(set(ranks))}
    return Chart(panel, "ranks", y, curves, log="x", x_names=names)


def _curve(name: str, at: Sequence[float], samples_ns: Sequence[Sequence[int]]) -> Curve:
    """Returns median, p10 and p90 of the samples at each place, in seconds."""
    spread = [np.percentile(samples, (50, 10, 90)) / 1e9 for samples in samples_ns]
    middle, low, high = np.array(spread).T.tolist()
    return Curve(name, at, middle, low, high)


_TITLES = {
    "fig2": "Figure 2: communication and computation",
    "fig6": "Figure 6: latency breakdown of an iteration",
    "fig7": "Figure 7: latency of an iteration by bucket size",
    "fig8": "Figure 8: latency of an iteration by bucket size, more ranks",
    "fig9": "Figure 9: scalability",
    "fig10": "Figure 10: skipped synchronisations",
    "fig11": "Figure 11: loss with skipped synchronisations",
    "fig12": "Figure 12: round-robin groups",
}

_PHASE_NAMES = {
    "forward": "forward",
    "backward": "backward computation",
    "communication": "communication",
    "step": "optimizer",
}

_CHARTS: Mapping[str, Callable[[str, Sequence[Measured]], Chart]] = {
    "fig2": _bucketing,
    "fig6": _breakdown,
    "fig7": _buckets,
    "fig8": _buckets,
    "fig9": _scaling,
    "fig10": _intervals,
    "fig11": _losses,
    "fig12": _lanes,
}
