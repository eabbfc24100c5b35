"""A rank that mpirun starts for :mod:`mpi_team`; runs tasks as those of :mod:`rank_server` do."""

from __future__ import annotations

import os
import sys

import rank_server

from collectives.ranks.mpirun import world_rank
from collectives.ranks.processes import connect


def main(address: str) -> None:
    rank = world_rank()
    connection = connect(address, rank)
    (folder,) = connection.recv()
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    connection.send(os.getpid())
    rank_server.be_rank(connection)


if __name__ == "__main__":
    main(sys.argv[1])
