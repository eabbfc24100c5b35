"""A rank that mpirun starts for :mod:`mpi_team`; runs tasks as those of :mod:`rank_server` do."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import rank_server


def world_rank() -> int:
    """Returns this process's rank in MPI's world before MPI has started."""
    return int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))


def main(folder: Path) -> None:
    rank = world_rank()
    with socket.socket(socket.AF_UNIX) as plug:
        plug.connect(str(folder / "parent"))
        connection = Connection(plug.detach())
    connection.send((rank, os.getpid()))
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    rank_server.be_rank(connection, log)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
