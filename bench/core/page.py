"""A report as a page: charts by Plotly, which need no network, tables, options and machine.

Jinja (which torch brings) fills the page and escapes what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.bench.core.records import BaseReport, Chart, Curve, facts, network_of, skipped_facts


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
    charts = [
        markupsafe.Markup(_drawn(chart, network, first=i == 0))  # noqa: S704 - Plotly's
        for i, chart in enumerate(report.charts())
    ]
    about = [
        ("Options", [*facts(report.options).items()]),
        ("Machine and versions", [*facts(report.environment).items()]),
        ("Not measured", [skipped_facts(one) for one in report.skipped]),
    ]
    text = Path(__file__).with_name("page.html.jinja").read_text("utf-8")
    page = jinja2.Environment(autoescape=True).from_string(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(report=report, command=command, charts=charts, about=about), "utf-8")


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Returns a logarithmic axis with whole numbers; Plotly would write 2 and 5 in every decade."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    steps = (1, 2, 5) if high - low < 4 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    shown = [f"{tick / 1e6:g} M" if tick >= 1e6 else f"{tick:g}" for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": shown}


def _trace(curve: Curve, named: bool) -> tuple[str, dict[str, Any]]:
    """Returns the kind of a curve's trace, and what is special to it; ``named`` curves are at names."""
    about: dict[str, Any] = {}
    if curve.low:
        about["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [high - value for high, value in zip(curve.high, curve.values, strict=True)],
            "arrayminus": [value - low for low, value in zip(curve.low, curve.values, strict=True)],
            "thickness": 1,
        }
    if curve.look == "boxes":
        return "Box", {**about, "boxmean": bool(curve.name)}
    if curve.look == "points":
        return "Scatter", {**about, "mode": "markers"}
    return ("Bar", about) if named else ("Scatter", {**about, "line": {"dash": curve.look}})


def _drawn(chart: Chart, network: Sequence[str], first: bool) -> str:
    """Returns the chart as HTML; the first one brings the library."""
    from plotly import graph_objects
    from plotly.colors import qualitative

    colors = qualitative.Plotly
    named = any(isinstance(at, str) for curve in chart.curves for at in curve.at)
    figure = graph_objects.Figure()
    for i, curve in enumerate(chart.curves):
        color = colors[(i if curve.color is None else curve.color) % len(colors)]
        kind, about = _trace(curve, named)
        if not curve.name:
            about["showlegend"] = False
        trace = getattr(graph_objects, kind)
        data: dict[str, Any] = {"x": list(curve.at), "y": list(curve.values)}
        figure.add_trace(trace(**data, name=curve.name, marker={"color": color}, **about))
    title = ", ".join([chart.title, *network])
    figure.update_layout(title=title, xaxis_title=chart.x, yaxis_title=chart.y, template="plotly_white")
    if chart.stacked:
        figure.update_layout(barmode="stack")
    if sum(curve.look == "boxes" for curve in chart.curves) > 1:
        figure.update_layout(boxmode="group")
    if named:
        figure.update_xaxes(type="category")  # names may be numbers
    elif chart.log:
        places = [float(at) for curve in chart.curves for at in curve.at]
        figure.update_layout(xaxis=_log_axis(places))
        if "y" in chart.log:
            heights = [y for curve in chart.curves for y in (*curve.values, *curve.low, *curve.high)]
            figure.update_layout(yaxis=_log_axis(heights))
    if chart.x_names:
        figure.update_xaxes(tickvals=list(chart.x_names), ticktext=list(chart.x_names.values()))
    if chart.from_zero:
        figure.update_yaxes(rangemode="tozero")
    return str(figure.to_html(full_html=False, include_plotlyjs=first))
