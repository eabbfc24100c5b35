"""``collectives bench allreduce`` as users run it."""

from __future__ import annotations

import json
import os

import bench_bodies  # noqa: F401 - registers backends
import pytest
from bench_reports import read_report

from collectives.bench.comparison import measurement
from collectives.bench.comparison.measurement import MAX_CALLS, MIN_CALLS, available_backends
from collectives.bench.comparison.options import DTYPES, Options
from collectives.bench.comparison.records import Record, Report
from collectives.bench.core import text
from collectives.bench.core.machine import bind_to_core, cores_of_ranks
from collectives.bench.core.records import Timing
from collectives.cli import main
from collectives.registry.backends import backend_names

pytestmark = pytest.mark.usefixtures("preloaded_python")

COLUMNS = [
    *("size", "count", "type", "redop", "root", "time", "p10", "p90", "min", "algbw", "busbw", "#wrong"),
    *("time", "algbw", "busbw", "#wrong", "loop"),
]


@pytest.fixture(autouse=True)
def few_threads_and_turns(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(measurement, "ROUNDS", 3)


def bench(*arguments):
    return main(["bench", "allreduce", *arguments])


def rows(text):
    """Returns the rows of all tables by the name of the peer."""
    tables, current = {}, None
    for line in text.splitlines():
        if " by " in line and line.startswith("# "):
            current = tables.setdefault(line.split(" by ")[1].split(",")[0], [])
        elif line.startswith("#") or not line.strip():
            continue
        elif current is not None and len(line.split()) == len(COLUMNS):
            current.append(line.split())
    return tables


def test_a_sweep_with_everything(tmp_path, capsys):
    status = bench(
        "--backends", "gloo,absent,elsewhere,faulty", "--import", "bench_bodies", "--nproc", "2",
        "--sizes", "8,4K,128K", "--iters", "6", "--warmup", "2", "--limit",
        "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"),
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 1  # one peer is wrong

    header = next(line for line in out.splitlines() if "#wrong" in line)
    assert header[1:].split() == COLUMNS
    tables = rows(out)
    assert list(tables) == ["gloo", "faulty", "limit"]
    for table_rows in tables.values():
        assert [row[:3] for row in table_rows] == [
            ["8", "2", "float32"], ["4096", "1024", "float32"], ["131072", "32768", "float32"],
        ]  # fmt: skip
    wrong = COLUMNS.index("#wrong")
    assert [row[wrong] for row in tables["gloo"]] == ["0", "0", "0"]
    # One element of each call on one of the ranks, warm-up calls included.
    assert [row[wrong] for row in tables["faulty"]] == ["8", "8", "8"]
    assert "# Out of bounds values : 0 OK" in out
    assert "FAILED" in out
    assert "# skipped absent: needs no_such_package" in out
    assert "python -m pip install no-such-package" in out
    assert "# skipped elsewhere: serves tensors on cuda" in out
    assert "faulty/gloo" in out
    assert "limit/gloo" not in out
    assert "of limit" in out

    report = read_report(tmp_path / "out.json")
    assert [(record.peer, record.size_bytes) for record in report.records] == [
        (peer, size) for size in (8, 4096, 131072) for peer in ("gloo", "faulty", "limit")
    ]
    for record in report.records:
        assert (record.cold.calls, record.hot.calls, record.ranks) == (6, 6, 2)
        assert (record.loop is not None) == (record.size_bytes <= 32768)
        assert 0 < record.cold.min_us <= record.cold.p10_us <= record.cold.median_us <= record.cold.p90_us
        assert record.cold_wrong_elements == (8 if record.peer == "faulty" else 0)
        assert record.hot_wrong_elements == (0 if record.peer != "faulty" else record.hot_wrong_elements)
        assert (record.busbw_gb_per_s(record.cold) is None) == (record.peer == "limit")
    assert {skipped.peer for skipped in report.skipped} == {"absent", "elsewhere"}
    assert report.options["calls"] == 6
    assert report.environment["torch"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


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


def test_algorithms_over_the_messages_of_a_backend_are_peers(tmp_path):
    path = tmp_path / "out.json"
    names = ["host", "host:naive", "HOST:gather", "host:ring", "host:tree", "gloo:ring"]
    assert bench("--backends", ",".join(names), "--nproc", "3", "--sizes", "4,4K", "--iters", "3",
                 "--warmup", "2", "--op", "avg", "--json", str(path),
                 "--goal", "host <= host:ring * 1000") == 0  # fmt: skip
    report = read_report(path)
    assert [record.peer for record in report.records if record.size_bytes == 4] == [
        name.lower() for name in names
    ]
    assert [record.wrong_elements for record in report.records] == [0] * 12
    assert not report.skipped


def test_algorithms_are_all_reduces(capsys):
    assert main(["bench", "collectives", "--ops", "broadcast", "--backends", "gloo,gloo:tree", "--sizes", "4",
                 "--iters", "2"]) == 0  # fmt: skip
    assert "# skipped gloo:tree with 2 ranks: is an all-reduce" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "host:rings"], "unknown algorithm 'rings' in 'host:rings'; known are naive, gather,"),
        (["--backends", "glo:ring"], "unknown backend 'glo'; known are"),
        (["--backends", "glo"], "unknown backend 'glo'; known are"),
        (["--sizes", "8000G"], "2 ranks with tensors of 8000 GiB need 80000.0 GiB of memory, but"),
        (["--dtype", "complex128", "--sizes", "8"], "size 8 is no multiple of the 16 bytes of a complex128"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, capsys):
    assert bench(*arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "8:4"], "must ascend"),
        (["--nproc", "0"], "must be 1 or more"),
        (["--warmup", "1"], "must be 2 or more"),
        (["--dtype", "float"], "invalid choice"),
        (["--op", "mean"], "invalid choice"),
        (["--in-place", "--out-of-place"], "not allowed with"),
        (["--backends", ","], "names nothing"),
    ],
)
def test_arguments_that_argparse_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_all_cpu_backends_and_mpi4py_are_measured_by_default():
    available, skipped = available_backends(None)
    assert {"host", "gloo"} <= {*available, *(entry.peer for entry in skipped)}
    assert sorted([*available, *(entry.peer for entry in skipped)]) == sorted([*backend_names(), "mpi4py"])


def test_data_types_are_those_of_torch():
    assert {"float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"} <= set(DTYPES)
    assert "float" not in DTYPES
    Options(sizes=(8,))


def test_long_sweeps_have_a_short_header():
    timing = Timing(1, 1.0, 1.0, 1.0, 1.0)
    record = Record("all_reduce", "x", 2, 8, 2, "float32", "sum", True, timing, 0, timing, 0)
    environment = dict.fromkeys(
        (
            "collectives",
            "torch",
            "numpy",
            "python",
            "host",
            "cpu",
            "cores_usable",
            "cores_online",
            "architecture",
            "system",
        ),
        "?",
    ) | {"cache_last_level_bytes": None, "memory_bytes": 2**30, "load_average_1min": 0.0}
    report = Report("allreduce", environment, {"sizes": list(range(8, 80, 8))}, [record])
    header = text.header_lines(report)
    assert header[-1] == "# options: sizes 8 to 72 (9)"
    assert "last-level cache unknown" in header[1]


def test_bound_ranks_have_a_core_each(monkeypatch):
    with pytest.raises(ValueError, match="1000 ranks cannot have a core each"):
        Options(ranks=(1000,), sizes=(8,), bind=True)
    cores = cores_of_ranks(len(os.sched_getaffinity(0)))
    assert set(cores) == os.sched_getaffinity(0)
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    for core in cores:
        bind_to_core(core)
    assert bound == [{core} for core in cores]
