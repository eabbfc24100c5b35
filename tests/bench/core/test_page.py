"""A report as a page: whole, escaped, without a network."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from collectives.bench.allreduce import Record, Report
from collectives.bench.core.devices import describe_machine
from collectives.bench.core.page import write_page
from collectives.bench.core.records import Chart, Curve, Skipped, Timing, made_with, report_lines
from collectives.bench.ddp import TrainingRecord, TrainingReport

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
    return Timing(10, us, us * 0.9, us * 1.25, us / 2, us)


def record(peer, size, us, operation="all_reduce"):
    times = timing(us), 0, timing(us), 0
    return Record(operation, peer, 2, size, size // 4, "float32", "sum", True, *times)


def page(tmp_path, records, skipped=(), options=None):
    file = tmp_path / "made" / "page.html"
    report = Report("allreduce", describe_machine(), options or {"nproc": [2]}, records, list(skipped))
    write_page(file, report, "collectives bench allreduce --html page.html")
    return file.read_text("utf-8")


def test_measurements_stand_in_a_table_for_each_peer_and_beside_one_another(tmp_path):
    records = [record("host", 8, 1.5), record("gloo", 8, 300.0), record("host", 1024, 2.0)]
    text = page(tmp_path, [*records, record("host", 8, 5.0, "broadcast")])
    (heading, *rows), (_, *gloo), beside, _hot, (_, *others), options, machine = Tables(text).tables
    assert heading[:2] == ["size (B)", "count (elements)"]
    assert [row[0] for row in rows] == ["8", "1024"]
    assert [row[heading.index("cold time (us)")] for row in rows] == ["1.50", "2.00"]
    assert [row[heading.index("cold time (us)")] for row in gloo] == ["300.0"]
    assert beside[:2] == [["size (B)", "host", "gloo", "gloo/host"], ["8", "1.50", "300.0", "200x"]]
    assert len(set(heading)) == len(heading), "no two columns of a name"
    assert [row[heading.index("cold time (us)")] for row in others] == ["5.00"]
    assert "all_reduce by host, 2 ranks, in-place; slowest rank, median over calls" in text
    assert "Out of bounds values : 0 OK" in text
    assert options == [["nproc", "2"]]
    assert {"cpu", "memory", "torch"} <= {name for name, _ in machine}
    assert "<code>collectives bench allreduce --html page.html</code>" in text


def test_options_and_facts_say_what_text_says_in_words(tmp_path):
    options = {
        "sizes": [8, 16], "bucket_cap_mb": None, "budget_s": 40.0, "imports": (), "link": None, "machines": 1,
    }  # fmt: skip
    text = page(tmp_path, [record("host", 8, 1.0)], options=options)
    (*_, shown, machine) = Tables(text).tables
    assert shown == [
        ["sizes", "8,16"],
        ["bucket cap", "auto MB"],
        ["budget", "40 s"],
        ["imports", "none"],
        ["link", "auto"],
        ["machines", "1"],
    ]
    assert all(value and "_" not in name for name, value in machine)
    assert not any("bytes" in name for name, _ in machine)


def test_units_are_those_of_text(tmp_path):
    timing_ms = timing(250_000.0)
    record_ = TrainingRecord(
        "ours:host", "small", 2, 2, 64, 4_000_000, 44, timing_ms, timing_ms, timing_ms, timing_ms, 400 << 20,
        200 << 20, True, True, 0.5, True,
    )  # fmt: skip
    report = TrainingReport("ddp", describe_machine(), {}, [record_])
    file = tmp_path / "page.html"
    write_page(file, report, "collectives bench ddp")
    (heading, row), *_ = Tables(file.read_text("utf-8")).tables
    assert row[heading.index("iteration (ms)")] == "250.0"
    assert row[heading.index("peak (MiB)")] == "400"
    said = "\n".join(report_lines(report))
    assert all(cell in said for cell in row)
    assert "/no-op: iteration over the same" in file.read_text("utf-8")


def test_titles_tell_of_several_machines(tmp_path):
    records = [record("host", 8, 1.0)]
    for options, said in (
        ({"machines": 1, "link": None}, "all_reduce, 2 ranks"),
        ({"machines": 2, "link": None}, "all_reduce, 2 ranks, 2 machines"),
        ({"machines": 2, "link": "1gbit"}, "all_reduce, 2 ranks, 2 machines, links of 1gbit"),
    ):
        text = page(tmp_path, records, options=options)
        assert plotted(text)[1]["title"]["text"] == said
        assert said.removeprefix("all_reduce, 2 ranks") in made_with(describe_machine(), options)


def test_there_is_a_chart_for_each_operation_that_has_sizes(tmp_path):
    records = [
        record("host", 8, 1.0),
        record("host", 8, 2.0, "all_gather"),
        record("host", 0, 3.0, "barrier"),
    ]
    text = page(tmp_path, records)
    assert text.count("Plotly.newPlot(") == 2 * 2, "times and bandwidths"
    assert "all_gather, 2 ranks" in text


def test_a_chart_has_a_curve_for_each_peer_with_medians_and_percentiles():
    records = [record("host", 8, 2.0), record("gloo", 8, 40.0), record("host", 16, 4.0)]
    times, rates = Report("allreduce", {}, {}, records).charts()
    assert isinstance(times, Chart)
    assert times.curves == [
        Curve("host", (8, 16), [2.0, 4.0], [1.8, 3.6], [2.5, 5.0], color=0),
        Curve("gloo", (8,), [40.0], [36.0], [50.0], color=1),
    ]
    assert rates.curves[0] == Curve("host", (8, 16), [0.004, 0.004], color=0)


def test_curves_of_several_numbers_of_ranks_are_told_apart():
    records = [record("host", 8, 2.0), replace(record("host", 8, 4.0), ranks=4)]
    times, _ = Report("allreduce", {}, {}, records).charts()
    assert times.title == "all_reduce"
    found = [(curve.name, curve.look, curve.color) for curve in times.curves]
    assert found == [("host, 2 ranks", "solid", 0), ("host, 4 ranks", "dash", 0)]


def drawn(tmp_path, chart):
    """The traces and the layout that a page hands to Plotly."""

    class Drawn(Report):
        def charts(self):
            return [chart]

    file = tmp_path / "page.html"
    write_page(file, Drawn("drawn", describe_machine(), {}), "collectives bench drawn")
    return plotted(file.read_text("utf-8"))


def plotted(text):
    """The traces and the layout of the last chart of a page."""
    call = text.rpartition("Plotly.newPlot(")[2]
    traces, end = json.JSONDecoder().raw_decode(call, call.index("["))
    layout, _ = json.JSONDecoder().raw_decode(call, call.index("{", end))
    return traces, layout


def test_numbers_on_a_logarithmic_axis_are_whole_and_differ(tmp_path):
    curve = Curve("host", [8, 1024, 1 << 20], [3.0, 40.0, 700.0])
    _, layout = drawn(tmp_path, Chart("times", "size", "us", [curve]))
    for axis in ("xaxis", "yaxis"):
        ticks, shown = layout[axis]["tickvals"], layout[axis]["ticktext"]
        assert len(set(shown)) == len(shown) == len(ticks)
    assert layout["yaxis"]["ticktext"][:5] == ["1", "2", "5", "10", "20"]
    assert layout["xaxis"]["ticktext"][-2:] == ["1 M", "10 M"]


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
        Curve("predicted", [4, 8], [5.0, 6.0], look="dash", color=0),
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
    assert Tables(text).tables[-1] == [["<b>", "<i>none</i>"]]
    assert f"all_reduce by {html.escape(peer)}, 2 ranks" in text
    assert "<img" not in text
    assert "<i>none" not in text


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    text = page(tmp_path, [record("host", 8, 1.0)])
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)
