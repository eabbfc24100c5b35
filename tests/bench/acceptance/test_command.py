"""``collectives accept``: what it prints, writes and returns, and its rehearsal over the double of NCCL."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks
from nccl_double.device import DoubleDevice
from nccl_double.platform import FILE_VARIABLE, DoublePlatform

import collectives
from collectives.backends.nccl.device import CudaDevice
from collectives.bench.acceptance import command, platform
from collectives.bench.acceptance.cases import CASES
from collectives.bench.acceptance.command import SECTIONS, Plan
from collectives.bench.acceptance.platform import Platform, load
from collectives.bench.acceptance.report import CheckFailedError, CheckSkippedError, Verdict, checked
from collectives.bench.core.devices import numbers_of_ranks
from collectives.cli import main
from collectives.conformance.examination import Answer, Status

pytestmark = pytest.mark.usefixtures("preloaded_python")


class NowhereRun(DoublePlatform):
    """A platform that nothing is run on."""

    def why_unavailable(self):
        return None

    def prepare(self):
        pass


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(command, "load", lambda module: NowhereRun())


def passes():
    return "as it should be", {"seconds": 1.5}


def fails():
    raise CheckFailedError("rank 1 | got no error")


def skips():
    raise CheckSkippedError("there is one GPU")


def breaks():
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    ("check", "status", "said"),
    [
        (passes, 0, "ok    here: it: as it should be"),
        (fails, 1, "FAIL  here: it: rank 1 | got no error"),
        (skips, 1, "skip  here: it: there is one GPU"),
        (breaks, 1, "FAIL  here: it: ZeroDivisionError: by zero"),
    ],
)
def test_a_row_that_did_not_pass_is_named_and_makes_the_status_1(
    check, status, said, nothing_runs, monkeypatch, tmp_path, capsys
):
    rows = {"here": lambda plan: iter([checked("here", "first", passes), checked("here", "it", check)])}
    monkeypatch.setattr(command, "SECTIONS", rows)
    written = tmp_path / "new" / "report.json"
    assert main(["accept", "--sections", "here", "--json", str(written)]) == status
    assert said in capsys.readouterr().out.splitlines()
    records = json.loads(written.read_text())["records"]
    verdicts = {"ok": "passed", "FAIL": "failed", "skip": "skipped"}
    assert [record["verdict"] for record in records] == ["passed", verdicts[said.partition(" ")[0]]]
    assert records[0]["figures"] == {"seconds": 1.5}


def test_the_page_holds_each_row_as_soon_as_it_is_there(nothing_runs, monkeypatch, tmp_path, capsys):
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    seen = []

    def rows(_plan):
        for name, check in (("first", passes), ("second", fails)):
            yield checked("here", name, check)
            seen.append(page.read_text("utf-8"))

    monkeypatch.setattr(command, "SECTIONS", {"here": rows})
    assert main(["accept", "--sections", "here", "--html", str(page)]) == 1
    assert "<h2>1 passed, 0 failed, 0 skipped</h2>" in seen[0]
    assert "<h2>1 passed, 1 failed, 0 skipped</h2>" in seen[1]
    for part in ("<td>second</td>", "rank 1 | got no error"):
        assert part not in seen[0]
        assert part in seen[1]
    assert [text.count("Plotly.newPlot(") for text in seen] == [1, 1]


def test_a_check_tells_for_how_long_it_has_been_under_way(nothing_runs, monkeypatch, capsys):
    monkeypatch.setattr("collectives.bench.core.arguments.SHOWN_EVERY_S", 0.01)
    monkeypatch.setattr("collectives.bench.core.arguments.LOGGED_EVERY_S", 0.0)

    def lasts():
        time.sleep(0.2)
        return passes()

    rows = {"here": lambda _plan: iter([checked("here", "it", lasts)])}
    monkeypatch.setattr(command, "SECTIONS", rows)
    assert main(["accept", "--sections", "here"]) == 0
    assert "# here: it: 0 s" in capsys.readouterr().err.splitlines()


def test_nothing_checked_is_no_success(nothing_runs, monkeypatch, capsys):
    monkeypatch.setattr(command, "SECTIONS", {"here": lambda _plan: iter(())})
    assert main(["accept", "--sections", "here"]) == 1


def test_unknown_sections_are_refused(nothing_runs, capsys):
    assert main(["accept", "--sections", "preflight,nothing"]) == 1
    assert "unknown sections nothing; known are preflight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ranks"), [((), (1, 2)), (("--ranks", "1"), (1,)), (("--ranks", "2,4"), (2, 4))]
)
def test_one_rank_is_trained_beside_others(words, ranks, nothing_runs, monkeypatch, capsys):
    plans = []
    monkeypatch.setattr(command, "SECTIONS", {"training": lambda plan: iter(plans.append(plan) or ())})
    main(["accept", "--sections", "training", *words])
    assert [plan.ranks for plan in plans] == [ranks]
    monkeypatch.setattr(command, "run_ranks", lambda _platform, _body, size, *_, **__: asked.append(size))
    monkeypatch.setattr(command, "_trained", lambda _plan, _model, size: asked.append(size))
    for name, expected in (("training", {*ranks}), ("failures", {*ranks} - {1})):
        asked = []
        [*SECTIONS[name](plans[0])]
        assert {*asked} == expected


def test_one_rank_alone_is_refused_where_it_has_nobody_to_talk_to(nothing_runs, capsys):
    assert main(["accept", "--ranks", "1", "--sections", "preflight,streams,training"]) == 1
    assert "one rank has nobody to talk to in streams" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_way_out_is_told(capsys):
    assert main(["accept"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "CUDA" in printed.err
    assert "--rehearse runs all of it over a double of NCCL" in printed.err


def test_an_installed_package_has_no_double(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(collectives, "__file__", str(tmp_path / "collectives" / "__init__.py"))
    assert main(["accept", "--rehearse"]) == 1
    assert "run it from a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "ranks"), [(1, [2]), (2, [2]), (3, [2, 3]), (4, [2, 3, 4]), (8, [2, 3, 8])])
def test_numbers_of_ranks(gpus, ranks):
    assert [*numbers_of_ranks(gpus)] == ranks


def refused_by_the_double(rank, size, file):
    os.environ[FILE_VARIABLE] = file
    platform = DoublePlatform()
    platform.take(rank, size)
    device = DoubleDevice.shared(torch.device("cpu"))
    tensor = torch.ones(3)
    platform.delay(0.01)
    said = []
    with platform.refusing_to_wait():
        total = tensor.add_(1.0).sum()
        event = device.record(device.current_stream())
        for wait in (total.item, lambda: device.block(event)):
            try:
                wait()
            except RuntimeError as error:  # noqa: PERF203 - both are asked
                said.append(str(error))
    device.block(event)
    return said


def test_the_double_refuses_to_wait(nccl_library):
    """As torch on CUDA in this mode: what is only put on a stream passes, what needs its end raises."""
    said = run_ranks(refused_by_the_double, 1, str(nccl_library), isolated=True)
    assert ["this thread would wait for a stream" in one for one in said[0]] == [True, True]


def test_cuda_refuses_to_wait_for_events(monkeypatch):
    """Of which torch's own check knows nothing."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = torch.cuda.Event.synchronize, CudaDevice.block
    with Platform().refusing_to_wait():
        for wait in (torch.cuda.Event.synchronize, CudaDevice.block):
            with pytest.raises(RuntimeError, match="would wait for an event"):
                wait(None)
    assert (torch.cuda.Event.synchronize, CudaDevice.block) == waits
    assert modes == ["error", "default"]


def test_platforms_by_module():
    assert isinstance(load("collectives.bench.acceptance.platform"), Platform)
    assert isinstance(load("nccl_double.platform"), DoublePlatform)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("UnsupportedOperationError: no", "float32 is stated, but refused: broadcast: "),
        ("RuntimeError: CUDA error", "float32 is stated, but refused: broadcast: "),
    ],
)
def test_a_backend_that_refuses_everything_fails(error, said, monkeypatch):
    def refuse(_backend, _ranks, asked, *, progress, **_):
        for question in asked:
            details = dict.fromkeys([question.function, "SUM"], error)
            progress(question, Answer(Status.UNSUPPORTED, details, 0, 1))

    monkeypatch.setattr(command, "examine", refuse)
    rows = {row.name: row for row in SECTIONS["conformance"](Plan("", NowhereRun(), (2,), short=True))}
    assert rows["broadcast, cupy, 2 ranks"].said.startswith(said)
    offered = {name for name, row in rows.items() if row.verdict is Verdict.PASSED}
    known = {"torch:gloo, 2 ranks", "all, cupy, 2 ranks"}
    unknown = {
        "isend, recv, tagged, cupy, 2 ranks",
        "isend, recv, tagged, strided, cupy, 2 ranks",
        "recv from any rank, cupy, 2 ranks",
        "recv from any rank, strided, cupy, 2 ranks",
    }
    assert offered == known | (unknown if error.startswith("Unsupported") else set())


def test_ranks_that_hang_are_not_asked_for_hours(monkeypatch):
    clock = [0.0]

    def hang(_backend, _ranks, asked, *, progress, **_):
        for question in asked:
            clock[0] += 250.0
            progress(question, Answer(Status.HANG, {question.function: "no answer"}, 0, 1))

    monkeypatch.setattr(command, "examine", hang)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    rows = [*SECTIONS["conformance"](Plan("", NowhereRun(), (2,), short=True))]
    assert [row.name for row in rows if row.verdict is Verdict.PASSED] == ["torch:gloo, 2 ranks"]
    assert rows[0].said.endswith("questions were asked in 600 s; the others are not known")
    (whole,) = (row for row in rows if row.name == "all, cupy, 2 ranks")
    assert re.fullmatch(r"only 3 of \d+ questions were asked in 600 s", whole.said)
    assert len(rows) == 2 + 3


@pytest.mark.parametrize(
    ("version", "reduces", "stated"), [(22809, True, True), (22809, False, False), (22304, True, False)]
)
def test_float8_is_asked_for_where_nccl_and_the_gpu_have_it(version, reduces, stated, monkeypatch):
    library = SimpleNamespace(version=lambda: version)
    monkeypatch.setattr(platform.providers, "load", lambda: library)
    monkeypatch.setattr(platform.NcclDevice, "reduces_float8", lambda: reduces)
    reason = Platform().stated.why_not("all_reduce", device="cuda", dtype=torch.float8_e5m2)
    assert (reason is None) == stated


def checkout(folder, body):
    """A repository with one test."""
    (folder / "tests" / "gpu").mkdir(parents=True)
    (folder / "tests" / "gpu" / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    {body}\n")
    return folder


def test_tests_of_the_repository(monkeypatch, tmp_path):
    for name, body, error, said in (
        ("skips", "pytest.skip('no device')", CheckSkippedError, "1 of 1 tests"),
        ("fails", "assert not 7", CheckFailedError, r"(?s)status 1: .*assert not 7"),
    ):
        folder = checkout(tmp_path / name, body)
        monkeypatch.setattr(command, "root", lambda folder=folder: folder)
        with pytest.raises(error, match=said):
            command.run_tests(["tests/gpu"])
    with pytest.raises(CheckFailedError, match="status 4"):
        command.run_tests(["tests/no_such_file.py"])
    monkeypatch.setattr(command, "root", lambda: tmp_path)
    with pytest.raises(CheckSkippedError, match="part of the repository"):
        command.run_tests([])


def test_the_tests_on_gpus_need_no_mpi(monkeypatch, tmp_path):
    """A machine without two MPIs that know of CUDA can be accepted; the row says what it is not asked."""
    folder = checkout(tmp_path, "pass") / "tests" / "gpu"
    (folder / "test_it.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pass\n")
    (folder / "test_mpi.py").write_text("import pytest\n\npytest.skip('no MPI', allow_module_level=True)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(command, "root", lambda: tmp_path)
    plan = Plan("", Platform(), (2,), short=True)
    (row,) = SECTIONS["tests"](plan)
    assert row.verdict is Verdict.PASSED, row.said
    assert row.said.startswith("1 tests passed; left out: tests/gpu/test_mpi.py, which needs two MPIs")
    assert row.figures == {"tests": 1, "failures": 0, "errors": 0, "skipped": 0}


@pytest.mark.full
@pytest.mark.timeout(400)
def test_rehearsal(nccl_library, tmp_path):
    written = tmp_path / "report.json"
    page = tmp_path / "report.html"
    words = ["accept", "--rehearse", "--short", "--json", str(written), "--html", str(page)]
    done = subprocess.run(
        [sys.executable, "-m", "collectives", *words],
        env={**os.environ, FILE_VARIABLE: str(nccl_library)},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    records = json.loads(written.read_text())["records"]
    assert {record["verdict"] for record in records} == {"passed"}
    names = {section: set() for section in SECTIONS}
    for record in records:
        names[record["section"]].add(record["name"])
    assert {"provider cupy", "provider pynccl", "one libnccl", "peer access"} <= names["preflight"]
    assert {"all_reduce, cupy, 2 ranks", "scatter, strided, cupy, 2 ranks"} <= names["conformance"]
    for section in ("streams", "failures"):
        titles = {case.title for case in CASES.values() if case.section == section}
        assert names[section] == {f"{title}, cupy, 2 ranks" for title in titles}
    assert {"all_reduce of 8 B, cupy, 2 ranks", "all_reduce of 4 KiB, cupy, 2 ranks"} <= names["bandwidth"]
    assert names["training"] == {"small, cupy, 1 rank", "small, cupy, 2 ranks"}
    assert names["host-cost"] == {"all", *command.LIMITS}
    assert len(names["tests"]) == 1
    text = page.read_text("utf-8")
    assert text.count("Plotly.newPlot(") == 1
    assert "all_reduce, cupy, 2 ranks" in text
