"""The bench starts the ranks of the mpi backend by mpirun, and those of the others with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench_reports import read_report
from mpi_team import Teams, need_launcher_of

from collectives.bench.allreduce import Record

pytestmark = pytest.mark.usefixtures("preloaded_python")


def measure(mpi: Teams, folder: Path, *before: str) -> list[Record]:
    """Returns what the bench finds, started by the words in front of it."""
    report = folder / "out.json"
    words = ["--backends", "host,mpi,gloo", "--sizes", "8,64K", "--iters", "3", "--warmup", "2"]
    environment = mpi.installation.environment(str(folder))
    environment["PATH"] = f"{mpi.installation.prefix / 'bin'}:{environment['PATH']}"
    need_launcher_of(mpi.installation, environment["PATH"])
    done = subprocess.run(
        [
            *before, sys.executable, "-m", "collectives", "bench", "allreduce", *words, "--json", str(report),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_report(report).records
    assert [(record.peer, record.size_bytes) for record in records] == [
        (peer, size) for size in (8, 65536) for peer in ("host", "mpi", "gloo")
    ]
    assert all(record.wrong_elements == 0 for record in records)
    return records


@pytest.mark.full
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_host_mpi_and_gloo_in_one_run(mpi: Teams, tmp_path: Path) -> None:
    assert {record.ranks for record in measure(mpi, tmp_path)} == {2}


@pytest.mark.full
@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_the_same_under_mpirun(mpi: Teams, tmp_path: Path) -> None:
    """One of the processes measures, with as many ranks as mpirun started."""
    records = measure(mpi, tmp_path, *mpi.installation.command(3))
    assert {record.ranks for record in records} == {3}
