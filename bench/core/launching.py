"""Ranks for given backends: processes of ours, or under ``mpirun`` where one of the backends needs it.

``python -m collectives.bench.core.launching ADDRESS`` is the program that ``mpirun`` starts for each rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from collectives.bench.comparison.mpi4py_peer import launch_environment, launcher
from collectives.bench.core.ranks import CommandTeam, SpawnedTeam, Team, commands, connect

__all__ = ["needs_mpirun", "start_ranks"]

_NEEDS_MPIRUN = "mpi"

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def needs_mpirun(name: str) -> bool:
    """Returns whether only ``mpirun`` can start the ranks of a backend, or of a peer over it."""
    return name.partition(":")[0] == _NEEDS_MPIRUN


def start_ranks(backends: Sequence[str], size: int, body: Callable[..., None], args: tuple[Any, ...]) -> Team:
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
    if not any(needs_mpirun(name) for name in backends):
        return SpawnedTeam(size, body, args)
    program = launcher()
    if program is None:
        raise FileNotFoundError("there is no mpirun")
    # The module mpi4py aborts all ranks where one raises; otherwise that one waits for the others at its end.
    words = ["-n", str(size), sys.executable, "-m", "mpi4py", "-m", "collectives.bench.core.launching"]
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
