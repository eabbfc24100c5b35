"""The command ``collectives``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import bench_bodies  # noqa: F401 - registers backends
import pytest
import torch

from collectives.bench import doctor
from collectives.bench.allreduce import Options
from collectives.bench.core.records import Skipped
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")


def ended(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code, capsys.readouterr()


def test_version(capsys):
    code, printed = ended(["--version"], capsys)
    assert code == 0
    assert printed.out.strip() == f"collectives {version('torch-collectives')}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], ("demo", "bench", "backends", "doctor")),
        (["bench", "--help"], ("allreduce", "How long does an all-reduce take")),
        (["bench", "allreduce", "--help"], ("--sizes", "--out-of-place", "#wrong")),
        (["demo", "--help"], ("--nproc", "--steps", "--out")),
        (["backends", "--help"], ("--all", "--json", "--markdown")),
        (["doctor", "--help"], ("two ranks",)),
    ],
)
def test_help(words, expected, capsys):
    code, printed = ended(words, capsys)
    assert code == 0
    for part in expected:
        assert part in printed.out


@pytest.mark.parametrize("words", [[], ["nothing"], ["bench"], ["bench", "nothing"], ["backends", "--x"]])
def test_wrong_words(words, capsys):
    code, printed = ended(words, capsys)
    assert code == 2
    assert "usage: collectives" in printed.err


def test_backends(capsys):
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["backend", "devices", "usable"]
    table = {line.split()[0]: line for line in lines[1 : lines.index("")]}
    assert table["gloo"].split() == ["gloo", "cpu,", "cuda", "yes"]
    assert table["absent"].split()[2] == "no"
    assert "needs no_such_package" in table["absent"]
    assert table["absent"].count("python -m pip install no-such-package") == 1


@pytest.mark.full
def test_no_program_is_loaded_before_it_is_asked_for_and_a_closed_pipe_is_no_error(fresh_python):
    script = (
        "import sys; from collectives.cli import main; status = main(['backends']);"
        "print([name for name in sys.modules if name.startswith('collectives.bench')], file=sys.stderr);"
        "sys.exit(status)"
    )
    command = f'{sys.executable} -c "$0" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command, script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in {0, 141}
    assert done.stderr == "[]\n"


def test_sigterm_unwinds(monkeypatch):
    monkeypatch.setattr(
        "collectives.cli.backends.backend_names", lambda: os.kill(os.getpid(), signal.SIGTERM) or []
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["backends"])
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.full
def test_doctor_names_the_mpi_that_ranks_use(capsys, monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}")  # of this environment
    monkeypatch.setattr(doctor, "available_backends", lambda names: (["mpi"], []))
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "2 ranks, mpi:" in line]
    library = re.search(r"mpi4py \d+\.\d+\.\d+, (\S+) .*, (/\S+)$", line)
    assert library is not None, line
    assert library[1] in {"Open", "MPICH", "Intel(R)"}
    assert Path(library[2]).name.startswith("libmpi")


def test_doctor(capsys, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_SOMETHING", "x")
    monkeypatch.setattr(doctor, "available_backends", lambda names: ([], [Skipped("mpi", "no MPI")]))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert "All is well" in out
    assert "COLLECTIVES_SOMETHING=x" in out
    for part in ("memfd", "pidfd", "unix sockets", "lo 127.0.0.1"):
        assert part in out
    assert "backend mpi: not usable here: no MPI" in out


def test_doctor_tells_what_works_and_what_fails(capsys, monkeypatch):
    def refuse(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(doctor, "available_backends", lambda names: (["gloo", "faulty"], []))
    monkeypatch.setattr(doctor, "Options", partial(Options, imports=("bench_bodies",)))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  shared memory without a name (memfd): OSError: [Errno 38] Function not implemented" in out
    assert "all_reduce of 2 ranks, gloo: right" in out
    wrong = r"FAIL  all_reduce of 2 ranks, faulty: RuntimeError: [1-9]\d* elements of the results are wrong"
    assert re.search(wrong, out)
    assert "2 of the checks failed" in out


def test_doctor_names_what_it_does_not_test_of_gpus(monkeypatch):
    assert [*doctor._untested()] == [] or torch.cuda.is_available()
    monkeypatch.setattr(doctor, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    first, command = doctor._untested()
    assert "4 GPUs" in first
    assert command.split() == ["collectives", "accept", "--json", "report.json"]
