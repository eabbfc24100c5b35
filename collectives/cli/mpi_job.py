"""What becomes of a command that ``mpirun`` started: one process carries it out, with ranks of its own.

A measurement is led by one process, which starts the ranks of each peer as that peer needs them. So under
``mpirun -n N collectives bench ...`` the first process does that, for N ranks where nothing else is said, and
the others leave at once.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

_MARKS = (
    "OMPI_ARGV", "OMPI_COMMAND", "OMPI_COMM_WORLD_", "OMPI_FILE_LOCATION", "OMPI_MCA_initial_wdir",
    "OMPI_MCA_num_procs", "OMPI_NUM_APP_CTX", "OMPI_TOOL_NAME", "OMPI_UNIVERSE_SIZE", "OMPI_WORLD_",
    "PMIX_", "PMI_", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL",
)  # fmt: skip
"""How variables begin by which a launcher tells a process its place; another ``mpirun`` would obey them."""

_SETTINGS = ("PMIX_MCA_",)
"""How those begin, among these, that a user sets."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place among those that ``mpirun`` started.

    Attributes:
        rank: its rank.
        size: number of processes.
        local_size: how many of them are on this machine, as far as the launcher says.
    """

    rank: int
    size: int
    local_size: int


def current() -> Place | None:
    """Returns its place in a job of ``mpirun``; ``None`` where this process is of none, or alone in it."""
    rank, size = _number(_RANKS), _number(_SIZES)
    if rank is None or size is None or size < 2:
        return None
    local = _number(_LOCAL_SIZES)
    return Place(rank, size, size if local is None else local)


def usual_ranks() -> int:
    """Returns how many ranks there are where the user says nothing: those of the job, or 2."""
    job = current()
    return 2 if job is None else job.size


def leave() -> None:
    """Makes this process one that starts programs, ``mpirun`` included, as if it were of no job.

    It gives up what the launcher wrote into its environment, and the core that the launcher bound it to: it
    may use those of the launcher.
    """
    for name in list(os.environ):
        if name.startswith(_MARKS) and not name.startswith(_SETTINGS):
            del os.environ[name]
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


def _number(names: tuple[str, ...]) -> int | None:
    return next((int(text) for name in names if (text := os.environ.get(name, "")).isdecimal()), None)
