"""A report as a page for people: HTML with tables and zoomable charts, in one file that needs no network.

Jinja (which torch brings) fills the page and escapes what it is given; Plotly draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.bench.core.charts import Chart
from collectives.bench.core.records import BaseReport

__all__ = ["write_page"]

_PAGE = """<!DOCTYPE html>
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
</style>
</head>
<body>
<h1>{{ report.program }}</h1>
<p><code>{{ command }}</code></p>
{% for chart in charts %}{{ chart }}{% endfor %}
<h2>Measurements</h2>
<div class="wide"><table>
<thead><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% for title, facts in tables if facts %}
<h2>{{ title }}</h2>
<table class="facts">
{% for name, value in facts %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% endfor %}
</body>
</html>
"""


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

    plain = report.as_json()
    records = [_flat(record) for record in plain["records"]]
    columns, common = _split(records)
    drawn = [markupsafe.Markup(_drawn(chart, first=i == 0)) for i, chart in enumerate(report.charts())]  # noqa: S704 - Plotly's
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    text = page.render(
        report=report,
        command=command,
        charts=drawn,
        columns=columns,
        rows=[[_shown(row.get(name)) for name in columns] for row in records],
        tables=[
            ("The same in all measurements", _facts(common)),
            ("Options", _facts(plain["options"])),
            ("Machine and versions", _facts(plain["environment"])),
            ("Not measured", [(one["peer"], one["reason"]) for one in plain["skipped"]]),
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

    bars = any(isinstance(at, str) for curve in chart.curves for at in curve.at)
    figure = graph_objects.Figure()
    for curve in chart.curves:
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [high - value for high, value in zip(curve.high, curve.values, strict=True)],
            "arrayminus": [value - low for low, value in zip(curve.low, curve.values, strict=True)],
            "thickness": 1,
        }
        kind = graph_objects.Bar if bars else graph_objects.Scatter
        figure.add_trace(kind(name=curve.name, x=list(curve.at), y=list(curve.values), error_y=spread))
    figure.update_layout(title=chart.title, xaxis_title=chart.x, yaxis_title=chart.y, template="plotly_white")
    if not bars:
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log")
    return str(figure.to_html(full_html=False, include_plotlyjs=first))
