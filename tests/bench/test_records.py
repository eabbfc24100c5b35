"""The result record and its JSON form."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from bench_reports import read_report

from collectives.bench.allreduce import Record, Report
from collectives.bench.core.records import Skipped, Timing, write_json
from collectives.bench.operations import bus_factor

TIMING = Timing(calls=5, median_us=2.0, p10_us=1.0, p90_us=4.0, min_us=0.5, mean_us=2.5)
RECORD = Record("all_reduce", "host", 4, 8000, 2000, "float32", "sum", True, TIMING, 0, TIMING, 0)


def test_slowest_rank_counts():
    timing = Timing.of([[1000, 9000, 3000], [2000, 1000, 3000]])
    assert (timing.calls, timing.median_us, timing.min_us) == (3, 3.0, 2.0)
    assert timing.p10_us == pytest.approx(2.2)
    assert timing.p90_us == pytest.approx(7.8)


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_bus_factor(ranks, factor):
    assert bus_factor("all_reduce", ranks) == factor


def test_bus_factors_of_other_operations():
    parts = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    assert [bus_factor(name, 4) for name in parts] == [0.75] * 5
    assert [bus_factor(name, 4) for name in ("broadcast", "reduce", "sendrecv")] == [1.0] * 3
    assert bus_factor("barrier", 4) is None


def test_bandwidths():
    assert RECORD.algbw_gb_per_s(TIMING) == pytest.approx(4.0)
    assert RECORD.busbw_gb_per_s(TIMING) == pytest.approx(6.0)
    assert replace(RECORD, operation="barrier").busbw_gb_per_s(TIMING) is None


def test_json_round_trip(tmp_path):
    other = replace(RECORD, loop=TIMING, cold_wrong_elements=3, hot_wrong_elements=4)
    assert other.wrong_elements == 7
    report = Report(
        "allreduce", {"cpu": "x"}, {"sizes": [8]}, [RECORD, other], [Skipped("mpi", "why", "how")]
    )
    path = tmp_path / "new" / "report.json"
    write_json(path, report.as_json())
    assert read_report(path) == report
    assert report.as_json()["records"][0]["host"] is None
    report = Report("allreduce", {}, {}, [replace(RECORD, host=TIMING)], [])
    write_json(tmp_path / "host.json", report.as_json())
    assert read_report(tmp_path / "host.json").records[0].host == TIMING
    plain = json.loads(path.read_text())
    assert plain["schema"] == 2
    assert plain["records"][0]["loop"] is None
    assert plain["records"][1]["cold"]["busbw_gb_per_s"] == pytest.approx(6.0)
    assert plain["skipped"] == [
        {"peer": "mpi", "reason": "why", "install": "how", "ranks": None, "operation": ""}
    ]


def test_numbers_that_json_does_not_have(tmp_path):
    path = tmp_path / "plain.json"
    write_json(path, {"a": math.nan, "b": [math.inf, 1.5], "c": (2,)})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1.5], "c": [2]}
