"""Images of reports: a grid of axes in a PNG file, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from collectives.bench.core.records import Chart, Curve
from collectives.bench.core.text import network_of

__all__ = ["draw", "image", "made_with"]

ROOM = 1.2
"""Height of axes over that of the highest bar on others, for the legend."""

WRAPPED_AT = 14
"""Characters of a line below a bar."""

_LINES: Mapping[str, Mapping[str, Any]] = {
    "line": {},
    "dashed": {"linestyle": "--"},
    "dotted": {"linestyle": ":"},
    "wide": {"linewidth": 6, "color": "black", "alpha": 0.2},
}
"""Looks of curves that are lines, as matplotlib has them."""


@contextmanager
def image(path: Path, rows: int, columns: int, size: tuple[float, float], title: str) -> Iterator[Any]:
    """Context with a grid of axes, which are written to a PNG image at its end.

    Args:
        path: of the image; its directory is made.
        rows: rows of the grid.
        columns: columns of the grid.
        size: width and height of one of its axes in inches.
        title: above all of them.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    yield figure.subplots(rows, columns, squeeze=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)


def draw(axes: Any, chart: Chart) -> None:
    """Draws a chart on axes of :func:`image`, without its title and a legend.

    Args:
        axes: the axes.
        chart: the chart; its bars, if it has some, stand on one another.
    """
    names = chart.names
    tops = [0.0] * len(names)
    for i, curve in enumerate(chart.curves):
        color = f"C{i if curve.color is None else curve.color}"
        label = curve.name or None
        at: Sequence[Any] = [names.index(str(place)) for place in curve.at] if names else curve.at
        if curve.look == "boxes":
            values = [
                [value for there, value in zip(at, curve.values, strict=True) if there == place]
                for place in range(len(names))
            ]
            _draw_boxes(axes, values, curve, color, *_place_of_boxes(chart, curve))
        elif curve.look == "points":
            axes.plot(at, curve.values, "x", markersize=4, alpha=0.6, color=color, label=label)
        elif names:
            bottoms = [tops[place] for place in at]
            axes.bar(at, curve.values, bottom=bottoms, width=0.6, color=color, label=label)
            for place, value in zip(at, curve.values, strict=True):
                tops[place] += value
        else:
            _draw_line(axes, chart, curve, color)
    axes.set(xlabel=chart.x, ylabel=chart.y)
    if names:
        axes.set_xticks(range(len(names)), [fill(name, WRAPPED_AT) for name in names], fontsize=8)
    else:
        axes.set(**{f"{letter}scale": "log" for letter in chart.log})
    if chart.x_names:
        axes.set_xticks([*chart.x_names], [*chart.x_names.values()])
        axes.minorticks_off()
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.stacked:
        axes.set_ylim(top=ROOM * max(tops))
        for place, top in enumerate(tops):
            axes.text(place, top, f"{top:.2f}", ha="center", va="bottom", fontsize=7)
    axes.grid(alpha=0.3)


def _place_of_boxes(chart: Chart, curve: Curve) -> tuple[float, float]:
    """Returns how far from its place a box stands, and its width: those of several curves side by side."""
    boxes = [other for other in chart.curves if other.look == "boxes"]
    width = 0.8 / len(boxes)
    return (next(i for i, other in enumerate(boxes) if other is curve) + 0.5) * width - 0.4, width


def _draw_boxes(
    axes: Any, values: Sequence[Sequence[float]], curve: Curve, color: str, offset: float, width: float
) -> None:
    line = {"color": color, "linewidth": 1.5}
    mean = {"markerfacecolor": color, "markeredgecolor": color, "markersize": 4}
    axes.boxplot(
        values,
        positions=[place + offset for place in range(len(values))],
        widths=0.7 * width,
        sym=".",
        medianprops=line,
        boxprops={"color": color} if curve.name else None,
        showmeans=bool(curve.name),
        meanprops=mean,
    )
    if curve.name:
        axes.plot([], [], color=color, label=curve.name)


def _draw_line(axes: Any, chart: Chart, curve: Curve, color: str) -> None:
    """Draws a line over numbers, and its spread."""
    look = {"color": color, "marker": "." if chart.x_names else "", **_LINES[curve.look]}
    axes.plot(curve.at, curve.values, label=curve.name or None, **look)
    if curve.low and chart.x_names:  # few places, where a band would not be seen
        ends = zip(curve.low, curve.values, curve.high, strict=True)
        off = zip(*((value - low, high - value) for low, value, high in ends), strict=True)
        axes.errorbar(curve.at, curve.values, [*off], fmt="none", capsize=3, color=color)
    elif curve.low:
        axes.fill_between(curve.at, curve.low, curve.high, alpha=0.2, color=color)


def made_with(environment: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Returns machines and versions of a report in a line."""
    versions = ", ".join(f"{name} {environment[name]}" for name in ("collectives", "torch", "python"))
    machine = [environment["cpu"], f"{environment['cores_usable']} cores", *network_of(options)]
    return f"{', '.join(machine)}; {versions}"
