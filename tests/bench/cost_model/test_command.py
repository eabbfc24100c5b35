"""``collectives bench model`` on records that were made by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from collectives.bench.comparison.records import Record
from collectives.bench.comparison.records import Report as Measurements
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.records import Timing, write_json
from collectives.bench.cost_model.calibration import Point, points_of_records, predicted_us
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.records import Report
from collectives.cli import main

TRUE = replace(Parameters(cores=2), arrival_us=3.0, copy_us_per_byte=3e-4, latency_us=80.0)
SIZES = [8, 4096, 65536, 1 << 20, 16 << 20]


def record(operation, size, scale, scatter=1.0, true=TRUE):
    us = predicted_us(Point(operation, size, scale, 0.0), true)
    timing = Timing(9, us * scatter**0.5, us, us * scatter, us)
    return Record(
        operation, "host", scale.ranks, size, size // 4, "float32", "sum", True, timing, 0, timing, 0
    )


def write(path, scales, scatter=1.0, true=TRUE, sizes=SIZES, **options):
    records = [
        record(operation, size, scale, scatter, true)
        for scale in scales
        for operation in ("all_reduce", "broadcast", "barrier", "all_gather")
        for size in ([0] if operation == "barrier" else sizes)
    ]
    environment = {**describe_machine(), "cores_usable": 2}
    records += [replace(entry, peer="gloo") for entry in records]
    write_json(path, Measurements("collectives", environment, options, records).as_json())
    return str(path)


def test_record_to_prediction(tmp_path, capsys):
    one = write(tmp_path / "one.json", [Scale(1, 2), Scale(1, 3), Scale(1, 4)])
    two = write(tmp_path / "two.json", [Scale(2, 1), Scale(2, 2)])
    left = [tmp_path / "model.json", tmp_path / "model.png"]
    words = ["--record", one, "--network-record", two, "--network-machines", "2", "--ranks", "64",
             "--sizes", "8,1M", "--json", str(left[0]), "--plot", str(left[1])]  # fmt: skip
    assert main(["bench", "model", *words]) == 0
    out = capsys.readouterr().out
    for part in ("# parameters, calibrated on", "pred/meas", "# error, check, all-reduce", "time doubles",
                 "# all_reduce of 1 MiB, 4 ranks on the 4 cores", "our other operations"):  # fmt: skip
        assert part in out
    plain = json.loads(left[0].read_text())
    used = {(entry["operation"], entry["size_bytes"], str(entry["scale"])) for entry in plain["calibration"]}
    kept = {(entry["operation"], entry["size_bytes"], str(entry["scale"])) for entry in plain["check"]}
    assert used
    assert kept
    assert not used & kept
    assert plain["check_errors"]["median"] < 0.1
    assert plain["parameters"]["latency_us"] == pytest.approx(80, rel=0.25)
    assert plain["predicted_for"]["cores"] == 4
    for size in (8, 1 << 20):
        for ranks in (4, 8, 64):
            rows = [
                entry for entry in plain["records"]
                if entry["size_bytes"] == size
                and entry["scale"]["machines"] * entry["scale"]["ranks_per_machine"] == ranks
            ]  # fmt: skip
            assert sum(entry["is_ours"] for entry in rows) == 1
    assert left[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_predictions_become_a_page(tmp_path):
    pytest.importorskip("plotly")
    one = write(tmp_path / "one.json", [Scale(1, 2), Scale(1, 4)])
    page = tmp_path / "model.html"
    words = ["--record", one, "--ranks", "16", "--sizes", "8,1M", "--html", str(page)]
    assert main(["bench", "model", *words]) == 0
    text = page.read_text("utf-8")
    assert text.count("Plotly.newPlot(") == 3
    for part in (
        "<h2>Predictions</h2>", "<td>Rabenseifner</td>", "<h2>Where algorithms stop</h2>",
        "<h2>Parameters</h2>", "<td>latency_us</td>", "<h2>Check</h2>",
    ):  # fmt: skip
        assert part in text


def test_what_is_predicted_is_drawn_over_what_was_measured():
    kept = [Point("broadcast", 8, Scale(1, 2), 3.0), Point("broadcast", 4096, Scale(1, 2), 5.0)]
    about = {"parameters": TRUE, "predicted_for": TRUE, "used": [], "sizes": [8], "scales": [Scale(2, 2)]}
    scaling, check = Report("model", {}, {}, kept=kept, **about).charts()
    assert scaling.title == "all_reduce of 8 B"
    assert {"ring", "ours, as chosen", "bound"} <= {curve.name for curve in scaling.curves}
    points, equal = check.curves
    assert (points.name, points.look, list(points.at)) == ("broadcast", "points", [3.0, 5.0])
    assert list(points.values) == [predicted_us(point, TRUE) for point in kept]
    assert equal.at == equal.values == [3.0, 5.0]
    assert len(Report("model", {}, {}, kept=[], **about).charts()) == 1, "nothing is checked"


def test_what_the_user_says_of_the_network_goes_before_what_was_measured(tmp_path):
    one = write(tmp_path / "one.json", [Scale(1, 2), Scale(1, 4)])
    two = write(tmp_path / "two.json", [Scale(2, 1), Scale(2, 2)])
    path = tmp_path / "model.json"
    words = ["--record", one, "--network-record", two, "--network-machines", "2", "--link-bandwidth", "25G",
             "--sizes", "25M", "--ranks", "8", "--json", str(path)]  # fmt: skip
    assert main(["bench", "model", *words]) == 0
    plain = json.loads(path.read_text())
    assert plain["predicted_for"]["link_us_per_byte"] == pytest.approx(1 / 3125)
    assert plain["parameters"]["link_us_per_byte"] == pytest.approx(TRUE.link_us_per_byte, rel=0.3)
    assert plain["predicted_for"]["latency_us"] == plain["parameters"]["latency_us"]


def test_a_slow_link_of_the_record_hides_no_other_cost(tmp_path):
    # Namespaces on shaped links, and a prediction for others, 25 times as fast.
    played = replace(TRUE, cores=1, link_us_per_byte=8e-3, burst_bytes=15_000, socket_us_per_byte=3e-4)
    one = write(tmp_path / "one.json", [Scale(1, 2), Scale(1, 4)])
    two = write(
        tmp_path / "two.json", [Scale(2, 1), Scale(2, 2)], true=played, machines=2, link="1gbit",
        sizes=[8, 64, 512, 4096, 32768, 65536, 262144, 2 << 20, 16 << 20],
    )  # fmt: skip
    path = tmp_path / "model.json"
    words = ["--record", one, "--network-record", two, "--link-bandwidth", "25G", "--sizes", "25M", "--ranks",
             "8", "--json", str(path)]  # fmt: skip
    assert main(["bench", "model", *words]) == 0
    found = json.loads(path.read_text())["parameters"]
    assert found["link_us_per_byte"] == pytest.approx(8e-3, rel=0.05)
    assert found["socket_us_per_byte"] == pytest.approx(3e-4, rel=0.5)
    assert found["burst_bytes"] == pytest.approx(15_000, rel=0.5)


def test_link_is_what_the_user_says(tmp_path, capsys):
    one = write(tmp_path / "one.json", [Scale(1, 2), Scale(1, 4)])
    path = tmp_path / "model.json"
    words = ["--link-bandwidth", "1G", "--link-latency", "50", "--message-overhead", "2", "--cores", "8",
             "--ranks-per-machine", "2", "--sizes", "25M", "--ranks", "4", "--json", str(path)]  # fmt: skip
    assert main(["bench", "model", "--record", one, *words]) == 0
    plain = json.loads(path.read_text())
    asked = plain["predicted_for"]
    assert asked["link_us_per_byte"] == pytest.approx(1 / 125)
    assert (asked["latency_us"], asked["message_us"], asked["cores"]) == (50, 2, 8)
    (ours,) = [entry for entry in plain["records"] if entry["is_ours"] and entry["scale"]["machines"] == 2]
    assert ours["algorithm"] == "hierarchical"
    assert ours["time_us"] >= 25 * 2**20 / 125  # both machines send the whole once
    assert ours["limit"] == "link of a machine"
    assert "given" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--record", "missing.json"], "missing.json"),
        (["--record", "{empty}"], "no measurement of the host backend"),
        (["--record", "{one}", "--network-record", "{one}", "--network-machines", "3"], "cannot be spread"),
        (["--record", "{one}", "--network-record", "{one}"], "does not say that its ranks were on several"),
        (["--record", "{noisy}"], "too noisy to calibrate with"),
    ],
)
def test_records_that_do_not_fit(words, message, tmp_path, capsys):
    one = write(tmp_path / "one.json", [Scale(1, 2), Scale(1, 4)])
    empty = write(tmp_path / "empty.json", [])
    noisy = write(tmp_path / "noisy.json", [Scale(1, 2), Scale(1, 4)], scatter=20.0)
    files = {"one": one, "empty": empty, "noisy": noisy}
    assert main(["bench", "model", *[word.format(**files) for word in words]]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--link-bandwidth", "0"], ["--ranks", "1"], ["--kind", "loop"]])
def test_arguments_that_argparse_refuses(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "model", *words])
    assert ended.value.code == 2


def test_only_our_known_operations_are_points():
    records = [
        record("all_reduce", 8, Scale(1, 2)),
        replace(record("broadcast", 8, Scale(1, 2)), peer="gloo"),
    ]
    records.append(replace(records[0], operation="add_", compared_as="all_reduce"))
    records.append(replace(records[0], ranks=1))
    assert len(points_of_records(records, "hot")) == 1
    assert points_of_records(records[:1], "cold", 2)[0].scale == Scale(2, 1)
