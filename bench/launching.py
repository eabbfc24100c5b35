"""Ranks for given backends: processes of ours, or under ``mpirun`` where one of the backends needs it.

``python -m collectives.bench.launching ADDRESS`` is the program that ``mpirun`` starts for each rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from collectives.bench.mpi4py_peer import launch_environment, launcher
from collectives.bench.ranks import CommandTeam, SpawnedTeam, Team, commands, connect

__all__ = ["NEEDS_MPIRUN", "start_ranks"]

NEEDS_MPIRUN = "mpi"
"""The backend whose ranks only ``mpirun`` can start."""

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def start_ranks(backends: Sequence[str], size: int, body: Callable[..., None], args: tuple[Any, ...]) -> Team:
    """Returns ranks that run ``body(rank, connection, *args)``, then wait for the parent to close.

    Args:
        backends: names of the backends that they use.
        size: number of ranks.
        body: function at the top level of a module.
        args: its further arguments; pickled.

    Raises:
        RankFailedError: they could not be started.
        FileNotFoundError: a backend needs ``mpirun``, and there is none.
    """
    if NEEDS_MPIRUN not in backends:
        return SpawnedTeam(size, body, args)
    program = launcher()
    if program is None:
        raise FileNotFoundError("there is no mpirun")
    # The module mpi4py aborts all ranks where one raises; otherwise that one waits for the others at its end.
    words = ["-n", str(size), sys.executable, "-m", "mpi4py", "-m", "collectives.bench.launching"]
    return CommandTeam(size, [program, *words], launch_environment(size), (body, args))


def _main(words: Sequence[str]) -> None:
    (address,) = words
    rank = int(next(os.environ[name] for name in _RANK_VARIABLES if name in os.environ))
    with connect(address, rank) as connection:
        body, args = connection.recv()
        body(rank, connection, *args)
        for command in commands(connection):  # stays until the parent closes: an earlier end is a failure
            raise RuntimeError(f"rank {rank} has done its work, but was given another command: {command!r}")


if __name__ == "__main__":
    _main(sys.argv[1:])
