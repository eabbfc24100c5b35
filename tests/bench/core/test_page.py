"""A report as a page: whole, escaped, without a network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from collectives.bench.comparison.records import Record, Report
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.page import write_page
from collectives.bench.core.records import Chart, Curve, Skipped, Timing

pytest.importorskip("plotly")


class Tables(HTMLParser):
    """The cells of each table, row by row."""

    def __init__(self, text):
        super().__init__()
        self.tables, self._inside = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")
            self._inside = True

    def handle_endtag(self, tag):
        self._inside = self._inside and tag not in {"td", "th"}

    def handle_data(self, data):
        if self._inside:
            self.tables[-1][-1][-1] += data


def timing(us):
    return Timing(10, us, us * 0.9, us * 1.25, us / 2)


def record(peer, size, us, operation="all_reduce"):
    times = timing(us), 0, timing(us), 0
    return Record(operation, peer, 2, size, size // 4, "float32", "sum", True, *times)


def page(tmp_path, records, skipped=()):
    file = tmp_path / "made" / "page.html"
    report = Report("allreduce", describe_machine(), {"nproc": [2]}, records, list(skipped))
    write_page(file, report, "collectives bench allreduce --html page.html")
    return file.read_text("utf-8")


def test_measurements_stand_in_a_table_and_what_they_share_in_another(tmp_path):
    text = page(tmp_path, [record("host", 8, 1.5), record("gloo", 8, 300.0), record("host", 1024, 2.0)])
    rows, common, options, machine = Tables(text).tables
    heading, *rows = rows
    assert heading[:3] == ["peer", "size bytes", "count elements"]
    assert [row[:2] for row in rows] == [["host", "8"], ["gloo", "8"], ["host", "1024"]]
    assert [row[heading.index("cold median us")] for row in rows] == ["1.5", "300", "2"]
    assert ["operation", "all_reduce"] in common
    assert ["ranks", "2"] in common
    assert options == [["nproc", "2"]]
    assert "torch" in {name for name, _ in machine}
    assert "<code>collectives bench allreduce --html page.html</code>" in text


def test_there_is_a_chart_for_each_operation_that_has_sizes(tmp_path):
    records = [
        record("host", 8, 1.0),
        record("host", 8, 2.0, "all_gather"),
        record("host", 0, 3.0, "barrier"),
    ]
    text = page(tmp_path, records)
    assert text.count("Plotly.newPlot(") == 2
    assert "all_gather, 2 ranks" in text


def test_a_chart_has_a_curve_for_each_peer_with_medians_and_percentiles():
    records = [record("host", 8, 2.0), record("gloo", 8, 40.0), record("host", 16, 4.0)]
    (chart,) = Report("allreduce", {}, {}, records).charts()
    assert isinstance(chart, Chart)
    assert chart.curves == [
        Curve("host", (8, 16), [2.0, 4.0], [1.8, 3.6], [2.5, 5.0]),
        Curve("gloo", (8,), [40.0], [36.0], [50.0]),
    ]


def drawn(tmp_path, chart):
    """The traces and the layout that a page hands to Plotly."""

    class Drawn(Report):
        def charts(self):
            return [chart]

    file = tmp_path / "page.html"
    write_page(file, Drawn("drawn", describe_machine(), {}), "collectives bench drawn")
    call = file.read_text("utf-8").rpartition("Plotly.newPlot(")[2]
    traces, end = json.JSONDecoder().raw_decode(call, call.index("["))
    layout, _ = json.JSONDecoder().raw_decode(call, call.index("{", end))
    return traces, layout


def test_bars_stand_on_one_another_where_a_chart_says_so(tmp_path):
    curves = [Curve("forward", ["5", "25"], [1.0, 2.0]), Curve("backward", ["5", "25"], [2.0, 3.0])]
    traces, layout = drawn(tmp_path, Chart("phases", "", "s", curves, stacked=True))
    assert [(trace["type"], trace["x"], trace["y"]) for trace in traces] == [
        ("bar", ["5", "25"], [1.0, 2.0]),
        ("bar", ["5", "25"], [2.0, 3.0]),
    ]
    assert layout["barmode"] == "stack"
    assert layout["xaxis"]["type"] == "category", "these names are no numbers"
    assert "type" not in layout["yaxis"]


def test_looks_and_axes_are_what_a_chart_says(tmp_path):
    curves = [
        Curve("measured", [1, 2], [3.0, 4.0]),
        Curve("predicted", [4, 8], [5.0, 6.0], look="dashed", color=0),
        Curve("", [4], [5.0], look="points"),
    ]
    chart = Chart("scaling", "ranks", "s", curves, log="x", x_names={1: "local", 2: "2"}, from_zero=True)
    (measured, predicted, points), layout = drawn(tmp_path, chart)
    assert measured["marker"] == predicted["marker"] != points["marker"]
    assert predicted["line"] == {"dash": "dash"}
    assert (points["mode"], points["showlegend"]) == ("markers", False)
    assert "showlegend" not in measured
    assert (layout["xaxis"]["type"], layout["xaxis"]["ticktext"]) == ("log", ["local", "2"])
    assert "type" not in layout["yaxis"]
    assert layout["yaxis"]["rangemode"] == "tozero"


def test_a_box_shows_all_values_at_a_name(tmp_path):
    curve = Curve("", ["0", "0", "5"], [1.0, 2.0, 3.0], look="boxes")
    (trace,), layout = drawn(tmp_path, Chart("sizes", "MB", "s", [curve]))
    assert (trace["type"], trace["x"], trace["y"]) == ("box", ["0", "0", "5"], [1.0, 2.0, 3.0])
    assert "rangemode" not in layout["yaxis"]


def test_names_are_no_markup(tmp_path):
    peer = "<img src=x onerror=alert(1)></script>"
    text = page(tmp_path, [record(peer, 8, 1.0)], [Skipped("<b>", "<i>none</i>")])
    shown = Tables(text).tables
    assert ["peer", peer] in shown[0] or peer in shown[0][1]
    assert shown[-1] == [["<b>", "<i>none</i>"]]
    assert "<img" not in text
    assert "<i>none" not in text


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    text = page(tmp_path, [record("host", 8, 1.0)])
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)
