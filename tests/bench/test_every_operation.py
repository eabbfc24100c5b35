"""``collectives bench collectives`` as users run it."""

from __future__ import annotations

import contextlib
import io

import bench_bodies  # noqa: F401 - registers backends
import pytest
from bench_reports import read_report

from collectives.bench.comparison import measurement
from collectives.bench.comparison.operations import OPERATIONS, rounded_count
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")

RANKS = 3  # parts do not divide sizes, and one rank has no partner


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, preloaded_python):
    """One run of everything: its status, its output and its report."""
    folder, output = tmp_path_factory.mktemp("every"), io.StringIO()
    words = [
        "bench", "collectives", "--backends", "gloo,faulty", "--import", "bench_bodies",
        "--nproc", str(RANKS), "--sizes", "64,128K", "--iters", "1", "--warmup", "2", "--limit",
        "--goal", "gloo <= faulty * 1000; ops broadcast",
        "--goal", "gloo <= faulty * 1000; ops all_reduce; ranks 2",
        "--json", str(folder / "out.json"),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(measurement, "ROUNDS", 1)
        status = main(words)
    return status, output.getvalue(), read_report(folder / "out.json")


@pytest.mark.full
def test_every_operation_is_measured_by_every_peer(full_run):
    _, _, report = full_run
    measured = {
        (record.compared_at, record.peer): [] for record in report.records
    }  # in the order of the report
    for record in report.records:
        measured[record.compared_at, record.peer].append(record.size_bytes)
        assert (record.cold.calls, record.hot.calls) == (1, 1)
        assert (record.loop is not None) == (record.size_bytes <= 32768)
        assert (record.root == 0) == (record.peer != "limit" and OPERATIONS[record.compared_at].rooted)
    for name, operation in OPERATIONS.items():
        sizes = [0] if name == "barrier" else [72, 131076] if operation.parts else [64, 131072]
        for peer in ("gloo", "faulty", *(["limit"] * (name != "barrier"))):
            assert measured.pop((name, peer)) == sizes
    assert not measured
    assert report.skipped == []


def test_wrong_results_are_counted_where_they_are(full_run):
    status, _, report = full_run
    assert status == 1
    wrong = {(record.compared_at, record.peer) for record in report.records if record.wrong_elements}
    assert wrong == {(name, "faulty") for name in ("all_reduce", "all_gather", "barrier")}
    for record in report.records:
        if record.peer == "faulty" and record.compared_at in {"all_reduce", "all_gather"}:
            assert record.cold_wrong_elements == 3  # one on one rank in each call, warm-up calls included


def test_output_names_operations_ratios_and_goals(full_run):
    _, out, _ = full_run
    for name in OPERATIONS:
        assert f"# {name} by gloo, 3 ranks" in out
        for kind in ("cold", "hot", "loop"):
            assert f"# {kind} time (us) of {name}, each peer with 3 ranks, then relative to gloo" in out
    assert "# goal gloo <= faulty * 1000; ops broadcast: met, 2 of 2 points" in out
    assert "# goal gloo <= faulty * 1000; ops all_reduce; ranks 2: NOT MEASURED, 0 of 0 points" in out


def test_quick_tells_one_line_for_each_point_and_why_some_are_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [
        "bench",
        "collectives",
        "--ops",
        "all_reduce,scatter,barrier",
        "--op",
        "band",
        "--backends",
        "gloo",
    ]
    image = tmp_path / "two.png"
    words += ["--nproc", "2", "--limit", "--quick", "--sizes", "1K,64K", "--plot", str(image)]
    assert main([*words, "--budget", "0.5"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert [line.split("us cold")[0].strip() for line in lines] == [
        "all_reduce, 2 ranks, 1 KiB", "all_reduce, 2 ranks, 64 KiB",  # the memory limit alone
        "scatter, 2 ranks, 1 KiB", "scatter, 2 ranks, 64 KiB", "barrier, 2 ranks, 0 B",
    ]  # fmt: skip
    assert ["gloo" in line for line in lines] == [False, False, True, True, True]
    assert ["reached" in line for line in lines] == [False, False, True, True, False]
    assert "# skipped gloo at all_reduce with 2 ranks: BAND is not defined for torch.float32" in out
    assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ops", "scan"], "unknown operation 'scan'; known are all_reduce"),
        (["--goal", "host < x"], "'host < x' is no goal"),
        (["--ops", "barrier", "--plot", "x.png"], "a barrier has none"),
    ],
)
def test_arguments_that_do_not_fit(words, message, capsys):
    assert main(["bench", "collectives", *words]) == 1
    assert message in capsys.readouterr().err


def test_sizes_are_rounded_up_to_parts_and_measured_once():
    points = measurement.points_of("all_gather", (4, 8, 12, 16), 4, 4)
    assert [(point.count, point.size_bytes) for point in points] == [(4, 16)]
    assert rounded_count(OPERATIONS["broadcast"], 10, 4, 4) == 3
    assert len(measurement.points_of("barrier", (4, 8), 4, 2)) == 1
