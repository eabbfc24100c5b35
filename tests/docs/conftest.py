"""Runs the programs that the documentation shows, by the line that says how."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_team import find_installations

PROGRAMS = {"torchrun": ["-m", "torch.distributed.run"], "python": [], "collectives": ["-m", "collectives"]}
"""What follows the interpreter in place of a program's name."""

_LIMIT_S = 100


def _words(command: str, environment: dict[str, str], folder: Path) -> list[str]:
    """Returns the command with this interpreter in place of those on the path."""
    program, *rest = shlex.split(command)
    if program == "mpirun":
        installations = find_installations()
        if not installations:
            pytest.skip("no MPI here: neither in this environment nor in COLLECTIVES_TEST_MPI")
        environment.update(installations[0].environment(str(folder)), PYTHONSAFEPATH="")
        ranks, inner = re.fullmatch(r"mpirun -n (\d+) (.*)", command).groups()
        return [*installations[0].command(int(ranks)), *_words(inner, environment, folder)]
    return [sys.executable, *PROGRAMS[program], *rest]


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., str]:
    """Gives a function that runs a command in a folder and returns its output; a failure shows it all."""

    def run(command: str, folder: Path, limit_s: float = _LIMIT_S) -> str:
        # Lightning begins an MPI of one rank where mpi4py is installed, which leaves a file behind.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_btl_sm_backing_directory": str(tmp_path),
        }
        done = subprocess.run(
            _words(command, environment, tmp_path),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Error" not in done.stderr, done.stderr
        return done.stdout

    return run
