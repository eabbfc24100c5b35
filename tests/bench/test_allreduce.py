"""``collectives bench allreduce`` as users run it."""

from __future__ import annotations

import contextlib
import io
import json
import os

import bench_bodies  # noqa: F401 - registers backends
import pytest
from bench_reports import read_report

from collectives.bench import allreduce
from collectives.bench.allreduce import DTYPES, MAX_CALLS, MIN_CALLS, Options, Report, available_backends
from collectives.bench.core.devices import cores_of_ranks
from collectives.bench.core.records import header_lines
from collectives.bench.operations import OPERATIONS, rounded_count
from collectives.cli import main
from collectives.registry.backends import backend_names

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.fixture(autouse=True)
def few_threads_and_turns(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(allreduce, "ROUNDS", 3)


def bench(*arguments):
    return main(["bench", "allreduce", *arguments])


def rows(text):
    """Returns the rows of the tables of each peer, by its name."""
    tables, current = {}, None
    for line in text.splitlines():
        if line.startswith("# ") and ("; slowest rank" in line or "time (us) of" in line):
            current = tables.setdefault(line.split(" by ")[1].split(",")[0], []) if " by " in line else None
        elif line.startswith("  ") and current is not None:
            current.append(line.split())
    return tables


def test_a_sweep_with_everything(tmp_path, capsys):
    status = bench(
        "--backends", "gloo,absent,elsewhere,faulty", "--import", "bench_bodies", "--nproc", "2",
        "--sizes", "8,4K,128K", "--iters", "6", "--warmup", "2", "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 1  # one peer is wrong

    tables = rows(out)
    assert list(tables) == ["gloo", "faulty"]
    for table_rows in tables.values():
        assert [row[:3] for row in table_rows] == [
            ["8", "2", "float32"], ["4096", "1024", "float32"], ["131072", "32768", "float32"],
        ]  # fmt: skip
    wrong = 11  # its column, after size, count, type, redop, root and the cold times
    assert [row[wrong] for row in tables["gloo"]] == ["0", "0", "0"]
    # One element of each call on one of the ranks, warm-up calls included.
    assert [row[wrong] for row in tables["faulty"]] == ["8", "8", "8"]
    assert "# Out of bounds values : 0 OK" in out
    assert "FAILED" in out
    assert "# skipped absent: needs no_such_package" in out
    assert "python -m pip install no-such-package" in out
    assert "# skipped elsewhere: serves tensors on cuda" in out
    for kind in ("cold", "hot", "loop"):
        assert f"# {kind} time (us) of all_reduce, each peer with 2 ranks, then relative to gloo" in out

    report = read_report(tmp_path / "out.json")
    assert [(record.peer, record.size_bytes) for record in report.records] == [
        (peer, size) for size in (8, 4096, 131072) for peer in ("gloo", "faulty")
    ]
    for record in report.records:
        assert (record.cold.calls, record.hot.calls, record.ranks) == (6, 6, 2)
        assert (record.loop is not None) == (record.size_bytes <= 32768)
        assert 0 < record.cold.min_us <= record.cold.p10_us <= record.cold.median_us <= record.cold.p90_us
        assert record.cold_wrong_elements == (8 if record.peer == "faulty" else 0)
        assert record.hot_wrong_elements == (0 if record.peer != "faulty" else record.hot_wrong_elements)
    assert {skipped.peer for skipped in report.skipped} == {"absent", "elsewhere"}
    assert report.options["calls"] == 6
    assert report.environment["torch"]


def test_adaptive_number_of_calls_and_several_numbers_of_ranks(tmp_path):
    path = tmp_path / "out.json"
    assert bench("--backends", "gloo", "--nproc", "1,3", "--sizes", "64", "--budget", "0.2", "--op", "max",
                 "--dtype", "int32", "--out-of-place", "--json", str(path)) == 0  # fmt: skip
    plain = json.loads(path.read_text())
    assert [record["ranks"] for record in plain["records"]] == [1, 3]
    for record in plain["records"]:
        assert MIN_CALLS <= record["cold"]["calls"] <= MAX_CALLS
        assert (record["dtype"], record["redop"], record["in_place"]) == ("int32", "max", False)
        assert record["cold_wrong_elements"] == record["hot_wrong_elements"] == 0
    assert plain["records"][0]["cold"]["busbw_gb_per_s"] == 0
    assert plain["records"][1]["cold"]["busbw_gb_per_s"] == pytest.approx(
        plain["records"][1]["cold"]["algbw_gb_per_s"] * 4 / 3
    )


def test_numbers_of_threads_are_peers(tmp_path):
    path = tmp_path / "out.json"
    assert bench("--threads", "1,3", "--nproc", "2", "--sizes", "1M", "--iters", "2",
                 "--warmup", "2", "--ops", "all_reduce,all_gather", "--json", str(path)) == 0  # fmt: skip
    records = read_report(path).records
    assert {(one.peer, one.operation) for one in records} == {
        (peer, name) for peer in ("host:1", "host:3") for name in ("all_reduce", "all_gather")
    }


def test_bound_ranks_share_the_cores_among_their_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    options = Options(threads=(1, 4, 8), ranks=(2, 4), sizes=(8,), bind=True)
    for ranks, share in ((2, 4), (4, 2)):
        cores = options.cores_to_bind(ranks)
        assert [len(one) for one in cores] == [share] * ranks
        assert sorted(core for one in cores for core in one) == [*range(8)]
    assert Options(ranks=(2,), sizes=(8,), bind=True).cores_to_bind(2) == ((0,), (1,))


@pytest.mark.full
def test_algorithms_over_the_messages_of_a_backend_are_peers(tmp_path):
    path = tmp_path / "out.json"
    names = [
        "host",
        "host:naive",
        "HOST:gather",
        "host:ring",
        "host:tree",
        "gloo:ring",
        "host:int8",
        "gloo:float8",
    ]
    assert bench("--backends", ",".join(names), "--nproc", "3", "--sizes", "4,4K", "--iters", "3",
                 "--warmup", "2", "--op", "avg", "--json", str(path)) == 0  # fmt: skip
    report = read_report(path)
    assert [record.peer for record in report.records if record.size_bytes == 4] == [
        name.lower() for name in names
    ]
    assert [record.wrong_elements for record in report.records] == [0] * 16
    assert not report.skipped


RANKS = 3  # parts do not divide sizes, and one rank has no partner


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, preloaded_python):
    """One run of every operation: its status, its output and its report."""
    folder, output = tmp_path_factory.mktemp("every"), io.StringIO()
    words = [
        "bench", "allreduce", "--ops", "all", "--backends", "gloo,faulty", "--import", "bench_bodies",
        "--nproc", str(RANKS), "--sizes", "64,128K", "--iters", "1", "--warmup", "2",
        "--json", str(folder / "out.json"),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(allreduce, "ROUNDS", 1)
        status = main(words)
    return status, output.getvalue(), read_report(folder / "out.json")


@pytest.mark.full
def test_every_operation_is_measured_by_every_peer(full_run):
    _, out, report = full_run
    measured = {(record.operation, record.peer): [] for record in report.records}
    for record in report.records:
        measured[record.operation, record.peer].append(record.size_bytes)
        assert (record.cold.calls, record.hot.calls) == (1, 1)
        assert (record.loop is not None) == (record.size_bytes <= 32768)
        assert (record.root == 0) == OPERATIONS[record.operation].rooted
    for name, operation in OPERATIONS.items():
        sizes = [0] if name == "barrier" else [72, 131076] if operation.parts else [64, 131072]
        assert f"# {name} by gloo, 3 ranks" in out
        for peer in ("gloo", "faulty"):
            assert measured.pop((name, peer)) == sizes
    assert not measured
    assert report.skipped == []


@pytest.mark.full
def test_wrong_results_are_counted_where_they_are(full_run):
    status, _, report = full_run
    assert status == 1
    wrong = {(record.operation, record.peer) for record in report.records if record.wrong_elements}
    assert wrong == {(name, "faulty") for name in ("all_reduce", "all_gather")}
    for record in report.records:
        if record.wrong_elements:
            assert record.cold_wrong_elements == 3  # one on one rank in each call, warm-up calls included


def test_what_a_peer_cannot_do_is_said(capsys):
    words = ["--ops", "all_reduce,broadcast", "--op", "band", "--backends", "gloo,gloo:tree"]
    assert bench(*words, "--sizes", "4", "--iters", "2") == 0
    out = capsys.readouterr().out
    assert "# skipped gloo at all_reduce with 2 ranks: BAND is not defined for torch.float32" in out
    assert "# skipped gloo:tree at broadcast with 2 ranks: is an all-reduce" in out


def test_all_cpu_backends_and_mpi4py_are_measured_by_default():
    available, skipped = available_backends(None)
    assert {"host", "gloo"} <= {*available, *(entry.peer for entry in skipped)}
    assert sorted([*available, *(entry.peer for entry in skipped)]) == sorted([*backend_names(), "mpi4py"])


def test_data_types_are_those_of_torch():
    assert {"float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"} <= set(DTYPES)
    assert "float" not in DTYPES
    Options(sizes=(8,))


def test_long_sweeps_have_a_short_header():
    report = Report("allreduce", {"cache_last_level_bytes": None}, {"sizes": list(range(8, 120, 8))})
    header = header_lines(report)
    assert header[-1] == "# options: sizes 8,...,112"
    assert "cache last level bytes auto" in header[1]


def test_bound_ranks_have_a_core_each():
    with pytest.raises(ValueError, match="1000 ranks cannot have a core each"):
        Options(ranks=(1000,), sizes=(8,), bind=True)
    assert set(cores_of_ranks(len(os.sched_getaffinity(0)))) == os.sched_getaffinity(0)


def test_sizes_are_rounded_up_to_parts_and_measured_once():
    points = allreduce.points_of("all_gather", (4, 8, 12, 16), 4, 4)
    assert [(point.count, point.size_bytes) for point in points] == [(4, 16)]
    assert rounded_count(OPERATIONS["broadcast"], 10, 4, 4) == 3
    assert len(allreduce.points_of("barrier", (4, 8), 4, 2)) == 1
