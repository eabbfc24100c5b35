"""A report as a page for people: HTML with tables and zoomable charts, in one file that needs no network.

Jinja (which torch brings) fills the page and escapes what it is given; Plotly draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.bench.core.records import BaseReport, Chart

__all__ = ["write_page"]

_PAGE = """{%- macro listed(title, facts, level=2) %}
<h{{ level }}>{{ title }}</h{{ level }}>
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
{% for title, columns, rows, common in tables %}
<h2>{{ title }}</h2>
<div class="wide"><table>
<thead><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row %}\
<td{% if cell|length > 40 %} class="long"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% if common %}{{ listed("The same in all rows", common, 3) }}{% endif %}
{% endfor %}
{% for title, facts in about if facts %}{{ listed(title, facts) }}{% endfor %}
</body>
</html>
"""

_LINES = {
    "line": {},
    "dashed": {"dash": "dash"},
    "dotted": {"dash": "dot"},
    "wide": {"width": 8, "color": "rgba(0, 0, 0, 0.2)"},
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

    drawn = [markupsafe.Markup(_drawn(chart, first=i == 0)) for i, chart in enumerate(report.charts())]  # noqa: S704 - Plotly's
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    text = page.render(
        report=report,
        command=command,
        charts=drawn,
        tables=[(title, *_table(rows)) for title, rows in report.tables().items()],
        about=[
            ("Options", _facts(report.options)),
            ("Machine and versions", _facts(report.environment)),
            ("Not measured", [(one.peer, one.reason) for one in report.skipped]),
        ],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _flat(record: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns a record without mappings within: what they hold has both names."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{before}{key}".replace("_", " ")
        found |= _flat(value, f"{name} ") if isinstance(value, Mapping) else {name: value}
    return found


def _split(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of what differs between records, and what does not differ."""
    names = list(dict.fromkeys(name for record in records for name in record))
    varied = [name for name in names if len({str(record.get(name)) for record in records}) > 1]
    columns = varied or names
    common = {name: records[0].get(name) for name in names if name not in columns} if records else {}
    return columns, common


def _table(
    records: Iterable[Mapping[str, Any]],
) -> tuple[list[str], list[list[str]], Iterable[tuple[str, str]]]:
    """Returns the columns and rows of records, and what does not differ between them."""
    flat = [_flat(record) for record in records]
    columns, common = _split(flat)
    return columns, [[_shown(row.get(name)) for name in columns] for row in flat], _facts(common)


def _facts(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return [(name.replace("_", " "), _shown(value)) for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_shown(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return "" if value is None else str(value)


def _drawn(chart: Chart, first: bool) -> str:
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
        elif names and curve.look == "line":
            kind = graph_objects.Bar
        else:
            kind = graph_objects.Scatter
            about |= {"mode": "markers"} if curve.look == "points" else {"line": _LINES[curve.look]}
        figure.add_trace(kind(x=list(curve.at), y=list(curve.values), **about))
    figure.update_layout(title=chart.title, xaxis_title=chart.x, yaxis_title=chart.y, template="plotly_white")
    if chart.stacked:
        figure.update_layout(barmode="stack")
    if names:
        figure.update_xaxes(type="category")  # names may be numbers
    else:
        for letter in chart.log:
            figure.update_layout({f"{letter}axis_type": "log"})
    if chart.x_names:
        figure.update_xaxes(tickvals=list(chart.x_names), ticktext=list(chart.x_names.values()))
    if chart.from_zero:
        figure.update_yaxes(rangemode="tozero")
    return str(figure.to_html(full_html=False, include_plotlyjs=first))
