"""``collectives bench compare``: what counts as slower, what both runs lack, and files that are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives.bench.comparison.records import Record, Report
from collectives.bench.core.records import Timing, write_json
from collectives.bench.ddp import TrainingRecord, TrainingReport
from collectives.bench.store import StoreRecord, StoreReport
from collectives.cli import main


def timing(median, spread=0.1):
    return Timing(20, median, median * (1 - spread), median * (1 + spread), median * (1 - spread))


def record(peer, size, cold, hot=5.0, loop=None):
    return Record(
        "all_reduce", peer, 2, size, size // 4, "float32", "sum", True,
        timing(cold), 0, timing(hot), 0, loop,
    )  # fmt: skip


def training_record(us):
    times = timing(us), timing(us / 2), timing(us / 4), timing(us / 8)
    return TrainingRecord(
        "ours:host", "small", 2, 8, 16, 100, 4, *times, 1 << 20, 1 << 19, True, True, 1.0, True
    )


def store_record(calls_per_s):
    rates = {"collectives": [calls_per_s * part for part in (0.95, 1.0, 1.05)], "torch": [1e4, 1e4, 1e4]}
    return StoreRecord("here", "get", {name: each[1] for name, each in rates.items()}, rates, right=True)


def compare(
    tmp_path, capsys, old, new, *words, environment=None, report=lambda *of: Report("allreduce", *of)
):
    for name, records in (("old", old), ("new", new)):
        machine = {"cpu": "x", "load_average_1min": len(name)}
        if name == "new":
            machine |= environment or {}
        write_json(tmp_path / f"{name}.json", report(machine, {"calls": 20}, records).as_json())
    status = main(["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *words])
    return status, capsys.readouterr().out.splitlines()


OLD = [record("host", 8, 10.0), record("host", 1024, 10.0), record("gloo", 8, 100.0)]


def test_medians_outside_each_others_band_count(tmp_path, capsys):
    new = [record("host", 8, 12.5), record("host", 1024, 10.8, loop=timing(3.0)), record("gloo", 8, 80.0)]
    status, lines = compare(tmp_path, capsys, OLD, new)
    assert status == 1
    assert [line.split()[1:] for line in lines if not line.startswith("#")] == [
        ["host", "2", "8", "cold", "10.00", "12.50", "1.25", "slower"],
        ["gloo", "2", "8", "cold", "100.00", "80.00", "0.80", "faster"],
    ]
    assert lines[-1] == "# 6 times in both runs: 1 slower, 1 faster, 4 within noise"


def test_a_wide_band_of_either_run_is_noise(tmp_path, capsys):
    for wide in ("old", "new"):
        old, new = record("host", 8, 10.0), record("host", 8, 13.0)
        if wide == "old":
            old = replace(old, cold=timing(10.0, 0.5))
        else:
            new = replace(new, cold=timing(13.0, 0.5))
        status, lines = compare(tmp_path, capsys, [old], [new])
        assert status == 0
        assert lines == ["# 2 times in both runs: 0 slower, 0 faster, 2 within noise"]


def test_faster_is_no_failure_and_what_only_one_run_has_is_counted(tmp_path, capsys):
    new = [record("host", 8, 5.0), record("mpi4py", 8, 5.0)]
    status, lines = compare(tmp_path, capsys, OLD, new, "--kinds", "cold", environment={"torch": "3"})
    assert status == 0
    assert lines[0] == "# differs: torch: None in the old run, 3 in the new one"
    assert lines[-3:] == [
        "# 1 times in both runs: 0 slower, 1 faster, 0 within noise",
        "# 2 points are in the old run only",
        "# 1 points are in the new run only",
    ]


def test_all_shows_what_did_not_change(tmp_path, capsys):
    status, lines = compare(tmp_path, capsys, OLD, OLD, "--all")
    assert status == 0
    assert len([line for line in lines if not line.startswith("#")]) == 6


@pytest.mark.parametrize(
    ("report", "program", "old", "new", "rows"),
    [
        (
            TrainingReport,
            "ddp",
            training_record(1000.0),
            replace(training_record(1000.0), backward=timing(500.0), peak_memory_bytes=1 << 21),
            ["small ours:host 2 8 16 backward 250.00 500.00 2.00 slower"],
        ),
        (
            StoreReport,
            "store",
            store_record(10e3),
            store_record(5e3),
            ["here get collectives call 100.00 200.00 2.00 slower"],
        ),
    ],
)
def test_reports_of_other_programs_are_compared_by_the_same_rule(
    tmp_path, capsys, report, program, old, new, rows
):
    def of(*parts):
        return report(program, *parts)

    status, lines = compare(tmp_path, capsys, [old], [new], report=of)
    assert status == 1
    assert [" ".join(line.split()) for line in lines if not line.startswith("#")] == rows
    status, lines = compare(tmp_path, capsys, [old], [old], report=of)
    assert status == 0
    assert "0 slower, 0 faster" in lines[-1]


def test_reports_of_two_kinds_and_of_none_are_refused_by_name(tmp_path, capsys):
    files = {}
    for program, report in (
        ("ddp", TrainingReport("ddp", {}, {}, [training_record(1.0)])),
        ("store", StoreReport("store", {}, {}, [store_record(1.0)])),
        ("wire", Report("wire", {}, {}, [])),
    ):
        files[program] = str(tmp_path / f"{program}.json")
        write_json(tmp_path / f"{program}.json", report.as_json())
    for old, new, message in (
        ("ddp", "store", "ddp.json holds a report of 'ddp', but"),
        ("store", "ddp", "ddp.json one of 'ddp'"),
        ("wire", "ddp", "wire.json holds a report of 'wire', but only those of allreduce"),
    ):
        assert main(["bench", "compare", files[old], files[new]]) == 1
        assert message in capsys.readouterr().err
    assert main(["bench", "compare", files["ddp"], files["ddp"], "--kinds", "cold"]) == 1
    assert "unknown times cold; known are iteration" in capsys.readouterr().err


def test_what_cannot_be_compared(tmp_path, capsys):
    def refused(*words):
        assert main(["bench", "compare", *map(str, words)]) == 1
        return capsys.readouterr().err

    file = tmp_path / "file.json"
    assert "No such file" in refused(file, file)
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 1, "records": [3]}'):
        file.write_text(text)
        assert "file.json holds no report of allreduce, collectives, demo, ddp or store" in refused(
            file, file
        )
    compare(tmp_path, capsys, OLD, [record("host", 64, 1.0)])
    both = (tmp_path / "old.json", tmp_path / "new.json")
    assert "have no point in common (operation, peer, ranks, size (B))" in refused(*both)
    assert "unknown times warm; known are cold, hot, loop" in refused(*both, "--kinds", "warm")
