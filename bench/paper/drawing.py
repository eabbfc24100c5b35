"""The figures as images, with the paper's axes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectives.bench.core.image import image, made_with
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.iterations import PHASES
from collectives.bench.paper.tables import usual_samples

__all__ = ["Predicted", "draw"]

TITLE_WIDTH = 50
"""Characters of the title over each panel of a row."""

COLUMNS = 4
"""Most panels in a row."""

ROOM = 1.2
"""Height of figure 6's panels over that of the highest bar."""

WRAPPED_AT = 14
"""Characters of a line below a bar of figure 6."""

CUTOFF = 0.05
"""Of figure 11's filter, as part of half the sampling rate."""

FILTER_ORDER = 3


@dataclass(frozen=True, slots=True)
class Predicted:
    """An iteration that was not measured.

    Attributes:
        panel: where it is drawn.
        ranks: number of ranks.
        seconds: how long the cost model says it takes.
        network: what that takes for the network, in words.
    """

    panel: str
    ranks: int
    seconds: float
    network: str


def draw(
    name: str,
    records: Sequence[Measured],
    environment: Mapping[str, Any],
    path: Path,
    predicted: Sequence[Predicted] = (),
) -> None:
    """Writes a figure as a PNG image.

    Args:
        name: of the figure.
        records: its cells, at least one.
        environment: of the report.
        path: of the image; its directory is made.
        predicted: what is drawn apart from what was measured.

    Raises:
        ModuleNotFoundError: matplotlib or scipy is not installed.
    """
    panels: dict[str, list[Measured]] = {}
    for record in records:
        panels.setdefault(_panel(name, record), []).append(record)
    if name == "fig9":  # each backend's line begins with the iteration of one rank
        panels = _with_local(panels)
    columns = _columns([panel.split(",")[0] for panel in panels])
    rows = -(-len(panels) // columns)
    about = f"{_TITLES[name]}. {made_with(environment)}"
    title = "\n".join(textwrap.wrap(about, TITLE_WIDTH * columns))
    with image(path, rows, columns, (4.6, 4.0), title) as grid:
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for (panel, chosen), axes in zip(panels.items(), grid.flat, strict=False):
            axes.set_title(panel, fontsize=9)
            axes.grid(alpha=0.3)
            if name == "fig9":
                _draw_scaling(axes, chosen, [point for point in predicted if point.panel == panel])
            else:
                _DRAWERS[name](axes, chosen)
            if name == "fig6":
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


def _draw_bucketing(axes: Any, records: Sequence[Measured]) -> None:
    if records[0].cell["kind"] == "AllReduceSweep":
        for record in records:
            totals = np.array(record.samples["total_ns"]) / 1e9
            low, middle, high = np.percentile(totals, (10, 50, 90), axis=1)
            counts = record.cell["counts"]
            axes.plot(counts, middle, "o-", markersize=3, label=record.cell["backend"])
            axes.fill_between(counts, low, high, alpha=0.2)
        axes.set(xscale="log", yscale="log", xlabel="parameters per all-reduce", ylabel="total time (s)")
        return
    ready = np.array(records[0].samples["ready_ns"]) / 1e9
    low, middle, high = np.percentile(ready, (10, 50, 90), axis=0)
    number = np.arange(1, ready.shape[1] + 1)
    axes.plot(number, middle, label=f"median of {len(ready)} passes")
    axes.fill_between(number, low, high, alpha=0.3, label="p10 to p90")
    axes.set(xlabel="ready gradients", ylabel="time since backward began (s)")


def _draw_breakdown(axes: Any, records: Sequence[Measured]) -> None:
    names = [series["name"] for series in records[0].cell["series"]]
    bars = [usual_samples(record, i) for record in records for i in range(len(names))]
    medians = np.array([[np.median(times[phase]) for phase in PHASES] for times in bars])
    medians /= medians[names.index("no overlap")].sum()
    base = np.zeros(len(bars))
    for phase, height in zip(PHASES, medians.T, strict=True):
        axes.bar(names, height, bottom=base, width=0.6, label=_PHASE_NAMES[phase])
        base += height
    for place, total in enumerate(base):
        axes.text(place, total, f"{total:.2f}", ha="center", va="bottom", fontsize=7)
    axes.set_ylim(top=ROOM * base.max())  # for the legend
    axes.set_ylabel("time of an iteration (no overlap = 1)")
    axes.set_xticks(range(len(names)), [textwrap.fill(each, WRAPPED_AT) for each in names], fontsize=8)


def _draw_boxes(axes: Any, records: Sequence[Measured]) -> None:
    series = records[0].cell["series"]
    seconds = [np.array(usual_samples(records[0], i)["iteration"]) / 1e9 for i in range(len(series))]
    axes.boxplot(seconds, sym=".", medianprops={"color": "C0", "linewidth": 1.5})
    for i, times in enumerate(records[0].samples["series"]):
        rebuilt = [times["iteration"][place] / 1e9 for place in times["rebuilt"]]
        axes.plot([i + 1] * len(rebuilt), rebuilt, "x", color="C3", label=None if i else "wrapper made anew")
    axes.set_xticks(range(1, len(series) + 1), [f"{each['bucket_mb']:g}" for each in series])
    axes.set(xlabel="bucket size (MB)", ylabel="latency of an iteration (s)")


def _draw_scaling(axes: Any, records: Sequence[Measured], predicted: Sequence[Predicted]) -> None:
    spread = [np.percentile(usual_samples(record, 0)["iteration"], (10, 50, 90)) / 1e9 for record in records]
    ranks = [record.cell["ranks"] for record in records]
    low, middle, high = np.array(spread).T
    axes.errorbar(ranks, middle, (middle - low, high - middle), fmt="o-", capsize=3, label="measured")
    if predicted:
        axes.plot(
            [point.ranks for point in predicted],
            [point.seconds for point in predicted],
            "s--",
            color="grey",
            markerfacecolor="none",
            label=f"not measured: cost model, {predicted[0].network}",
        )
    _ranks_axis(axes, [*ranks, *(point.ranks for point in predicted)])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("latency of an iteration (s)")


def _draw_intervals(axes: Any, records: Sequence[Measured]) -> None:
    """Draws means, which skipped synchronisations lower, and not medians, which would show none."""
    for i, series in enumerate(records[0].cell["series"]):
        means = [np.mean(usual_samples(record, i)["iteration"]) / 1e9 for record in records]
        axes.plot([record.cell["ranks"] for record in records], means, "o-", label=series["name"])
    _ranks_axis(axes, [record.cell["ranks"] for record in records])
    axes.set_ylabel("mean latency of an iteration (s)")


def _draw_losses(axes: Any, records: Sequence[Measured]) -> None:
    from scipy.signal import butter, filtfilt

    for i, record in enumerate(records):
        losses = np.array(record.samples["losses"])
        interval, color = record.cell["interval"], f"C{i}"
        iterations = np.arange(1, len(losses) + 1)
        axes.plot(iterations, losses, ".", markersize=1.5, alpha=0.4, color=color)
        smooth = filtfilt(*butter(FILTER_ORDER, CUTOFF), losses)
        axes.plot(iterations, smooth, color=color, label=f"synchronised every {interval}")
    axes.set(xlabel="iteration", ylabel="loss")


def _draw_lanes(axes: Any, records: Sequence[Measured]) -> None:
    for i, series in enumerate(records[0].cell["series"]):
        spread = [
            np.percentile(usual_samples(record, i)["iteration"], (10, 50, 90)) / 1e9 for record in records
        ]
        low, middle, high = np.array(spread).T
        ranks = [record.cell["ranks"] for record in records]
        axes.errorbar(ranks, middle, (middle - low, high - middle), fmt="o-", capsize=3, label=series["name"])
    _ranks_axis(axes, [record.cell["ranks"] for record in records])
    axes.set_ylabel("latency of an iteration (s)")


def _ranks_axis(axes: Any, ranks: Sequence[int]) -> None:
    shown = sorted(set(ranks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, ["local" if number == 1 else str(number) for number in shown])
    axes.set_xlabel("ranks")


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

_DRAWERS: Mapping[str, Callable[[Any, Sequence[Measured]], None]] = {
    "fig2": _draw_bucketing,
    "fig6": _draw_breakdown,
    "fig7": _draw_boxes,
    "fig8": _draw_boxes,
    "fig10": _draw_intervals,
    "fig11": _draw_losses,
    "fig12": _draw_lanes,
}
