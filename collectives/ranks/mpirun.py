"""Ranks that ``mpirun`` starts, and the choice between those and spawned ones.

``python -m collectives.ranks.mpirun ADDRESS`` is the program that ``mpirun`` starts for each rank.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.ranks.processes import CommandRanks, RankProcesses, SpawnedRanks, connect, run_body

__all__ = [
    "find_mpirun",
    "mpirun_environment",
    "needs_mpirun",
    "start_ranks",
    "start_under_mpirun",
    "world_rank",
]

_NEEDS_MPIRUN = "mpi"

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def needs_mpirun(name: str) -> bool:
    """Returns whether only ``mpirun`` can start ranks for a backend, or for a peer over it (``mpi:ring``)."""
    return name.partition(":")[0] == _NEEDS_MPIRUN


def find_mpirun() -> str | None:
    """Returns the program that starts ranks, beside the interpreter or in PATH; ``None`` without one."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return shutil.which("mpirun", path=beside) or shutil.which("mpiexec", path=beside)


def mpirun_environment(ranks: int) -> Mapping[str, str]:
    """Returns the environment of ranks; Open MPI refuses root and more ranks than cores unless told."""
    extra: dict[str, str] = {}
    if os.geteuid() == 0:
        extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        extra |= {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
    return {**os.environ, **extra}


def world_rank() -> int:
    """Returns this process's rank in the job of ``mpirun``, before MPI has started."""
    return int(next(os.environ[name] for name in _RANK_VARIABLES if name in os.environ))


def start_under_mpirun(size: int, body: Callable[..., None], args: tuple[Any, ...]) -> RankProcesses:
    """Returns ranks under ``mpirun``; arguments and errors as of :func:`start_ranks`."""
    program = find_mpirun()
    if program is None:
        raise FileNotFoundError("there is no mpirun")
    # The module mpi4py aborts all ranks where one raises; otherwise that one waits for the others at its end.
    words = ["-n", str(size), sys.executable, "-m", "mpi4py", "-m", "collectives.ranks.mpirun"]
    return CommandRanks(size, [program, *words], mpirun_environment(size), (body, args))


def start_ranks(
    backends: Sequence[str], size: int, body: Callable[..., None], args: tuple[Any, ...]
) -> RankProcesses:
    """Returns ranks that run ``body(rank, connection, *args)``, then wait for the parent to close.

    Args:
        backends: names of the backends that they use, or of peers that reduce over those (``mpi:ring``).
        size: number of ranks.
        body: function at the top level of a module.
        args: its further arguments; pickled.

    Raises:
        RankFailedError: they could not be started.
        FileNotFoundError: a backend needs ``mpirun``, and there is none.
    """
    start = start_under_mpirun if any(map(needs_mpirun, backends)) else SpawnedRanks
    return start(size, body, args)


def _main(words: Sequence[str]) -> None:
    (address,) = words
    rank = world_rank()
    with connect(address, rank) as connection:
        body, args = connection.recv()
        run_body(rank, connection, body, args)


if __name__ == "__main__":
    _main(sys.argv[1:])
