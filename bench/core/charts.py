"""Charts of reports, drawn twice: by matplotlib into PNG images, by Plotly into a page that needs no network.

Jinja (which torch brings) fills the page and escapes what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from collectives.bench.core.records import BaseReport, Chart, Column, Curve
from collectives.bench.core.text import MACHINE, machine_facts, network_of, option_facts, skipped_facts

ROOM = 1.2
"""Height of axes over that of the highest bar on others, for the legend."""

WRAPPED_AT = 14
"""Characters of a line below a bar."""

WIDTH_INCHES, HEIGHT_INCHES = 4.6, 4.0
TITLE_WIDTH = 50
"""Size of a chart in an image, and characters of the image's title above each."""

FEW_NAMES = 6
"""At most so many names have room beside one another below an axis."""

_MATPLOTLIB: Mapping[str, Mapping[str, Any]] = {
    "line": {},
    "dashed": {"linestyle": "--"},
    "dotted": {"linestyle": ":"},
}
"""Looks of curves that are lines, as matplotlib has them."""


def write_image(path: Path, charts: Sequence[Chart], columns: int, title: str) -> None:
    """Writes charts as a PNG image, drawn without a display.

    Args:
        path: of the image; its directory is made.
        charts: at least one.
        columns: how many stand in a row.
        title: above all of them.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(WIDTH_INCHES * columns, HEIGHT_INCHES * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(wrap(title, TITLE_WIDTH * columns)), fontsize=11)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(charts) :]:
        axes.set_axis_off()
    for chart, axes in zip(charts, grid.flat, strict=False):
        axes.set_title(chart.title, fontsize=9)
        _draw(axes, chart)
        if chart.stacked:
            axes.legend(fontsize=7, loc="upper center", ncols=2)
        elif axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)


def _draw(axes: Any, chart: Chart) -> None:
    """Draws a chart on axes, without its title and a legend; its bars stand on one another."""
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
        slanted = {"rotation": 45, "ha": "right"} if len(chart.x_names) > FEW_NAMES else {}
        axes.set_xticks([*chart.x_names], [*chart.x_names.values()], **slanted)
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
    look = {"color": color, "marker": "." if chart.x_names else "", **_MATPLOTLIB[curve.look]}
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


_PAGE = """{%- macro listed(title, facts) %}
<h2>{{ title }}</h2>
<table class="facts">
{% for name, value in facts %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ report.program }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
  code { background: #f2f2f2; padding: .1rem .3rem; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
  th:first-child, td:first-child, .facts th, .facts td { text-align: left; }
  .facts td { white-space: normal; }
  td.long { text-align: left; white-space: pre-line; min-width: 30rem; }
</style>
</head>
<body>
<h1>{{ report.program }}</h1>
<p><code>{{ command }}</code></p>
{% for chart in charts %}{{ chart }}{% endfor %}
{% for table in tables %}
<h2>{{ table.heading }}</h2>
<div class="wide"><table>
<thead><tr>{% for column in table.columns %}<th>{{ heading(column) }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr>{% for cell in row %}\
<td{% if cell|length > 40 %} class="long"{% endif %}>{{ cell.strip() }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% for note in table.notes %}<p>{{ note }}</p>
{% endfor %}{% endfor %}
{% for line in report.reading() %}<p>{{ line }}</p>
{% endfor %}
{% for title, facts in about if facts %}{{ listed(title, facts) }}{% endfor %}
</body>
</html>
"""

_PLOTLY = {
    "line": {},
    "dashed": {"dash": "dash"},
    "dotted": {"dash": "dot"},
}
"""Looks of curves that are lines, as Plotly has them."""


def write_page(path: Path, report: BaseReport[Any], command: str) -> None:
    """Writes a report as a page.

    Args:
        path: of the HTML file; its directory is made, and what it held is lost.
        report: with its charts.
        command: the command line that made it.

    Raises:
        ModuleNotFoundError: Plotly is not installed.
    """
    import jinja2
    import markupsafe

    network = network_of(report.options)
    drawn = [
        markupsafe.Markup(_drawn(chart, network, first=i == 0))  # noqa: S704 - Plotly's
        for i, chart in enumerate(report.charts())
    ]
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    text = page.render(
        report=report,
        command=command,
        charts=drawn,
        tables=report.tables(),
        heading=_heading,
        about=[
            ("Options", [(_label(name), value) for name, value in option_facts(report.options).items()]),
            ("Machine and versions", _environment(report.environment)),
            ("Not measured", [skipped_facts(one) for one in report.skipped]),
        ],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


_LABELS = {"s": "(s)", "us": "(us)", "mb": "(MB)", "bytes": "(B)"}
"""Units at the end of names, as they are shown."""


def _label(name: str) -> str:
    """Returns the name of an option or of a fact as words."""
    words = name.split("_")
    return " ".join([*words[:-1], _LABELS.get(words[-1], words[-1])] if len(words) > 1 else words)


def _heading(column: Column) -> str:
    return " ".join(filter(None, (column.group, column.name.strip(), column.unit)))


def _environment(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns machine and versions by name, without what there is not."""
    more = {name: value for name, value in environment.items() if name not in MACHINE and value}
    return [*machine_facts(environment).items(), *((_label(name), _shown(more[name])) for name in more)]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_shown(one)}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _extent(chart: Chart, letter: str) -> list[float]:
    """Returns all numbers of a chart on an axis."""
    if letter == "x":
        return [float(at) for curve in chart.curves for at in curve.at]
    return [value for curve in chart.curves for value in (*curve.values, *curve.low, *curve.high)]


def _tick(value: float) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value:g}"


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Returns places on a logarithmic axis for whole numbers; Plotly would write 2 and 5 in every decade."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    steps = (1, 2, 5) if high - low < 4 else (1,)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def _drawn(chart: Chart, network: Sequence[str], first: bool) -> str:
    """Returns the chart as HTML; the first one brings the library."""
    from plotly import graph_objects
    from plotly.colors import qualitative

    names = chart.names
    colors = qualitative.Plotly
    figure = graph_objects.Figure()
    for i, curve in enumerate(chart.curves):
        color = colors[(i if curve.color is None else curve.color) % len(colors)]
        about: dict[str, Any] = {"name": curve.name, "marker": {"color": color}}
        if not curve.name:
            about["showlegend"] = False
        if curve.low:
            about["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [high - value for high, value in zip(curve.high, curve.values, strict=True)],
                "arrayminus": [value - low for low, value in zip(curve.low, curve.values, strict=True)],
                "thickness": 1,
            }
        if curve.look == "boxes":
            kind = graph_objects.Box
            about["boxmean"] = bool(curve.name)
        elif names and curve.look == "line":
            kind = graph_objects.Bar
        else:
            kind = graph_objects.Scatter
            about |= {"mode": "markers"} if curve.look == "points" else {"line": _PLOTLY[curve.look]}
        figure.add_trace(kind(x=list(curve.at), y=list(curve.values), **about))
    title = ", ".join([chart.title, *network])
    figure.update_layout(title=title, xaxis_title=chart.x, yaxis_title=chart.y, template="plotly_white")
    if chart.stacked:
        figure.update_layout(barmode="stack")
    if sum(curve.look == "boxes" for curve in chart.curves) > 1:
        figure.update_layout(boxmode="group")
    if names:
        figure.update_xaxes(type="category")  # names may be numbers
    else:
        for letter in chart.log:
            ticks = _log_ticks(_extent(chart, letter))
            about = {"type": "log", "tickvals": ticks, "ticktext": [*map(_tick, ticks)]}
            figure.update_layout({f"{letter}axis": about})
    if chart.x_names:
        figure.update_xaxes(tickvals=list(chart.x_names), ticktext=list(chart.x_names.values()))
    if chart.from_zero:
        figure.update_yaxes(rangemode="tozero")
    return str(figure.to_html(full_html=False, include_plotlyjs=first))
