"""What ranks of the bench's tests run; a module of its own, so that spawned processes can import it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import collectives
from collectives.backends.gloo import ProcessGroupGloo
from collectives.bench.core.ranks import SpinBarrier
from collectives.core.operations import ALL_GATHER_INTO_TENSOR, ALL_REDUCE, BARRIER, Call
from collectives.core.work import CompletedWork, Work
from collectives.ranks.processes import commands
from collectives.registry.backends import BackendSpec, GroupOptions, register_backend_spec


def multiply(rank: int, connection: Connection, factor: int) -> None:
    """Answers every number with itself times the factor, plus the rank."""
    for command in commands(connection):
        connection.send(command * factor + rank)


def fail(rank: int, connection: Connection, failing: int, how: str) -> None:
    """One rank sends its id and fails; the others follow later with an error of their own, or hang."""
    connection.send(os.getpid())
    connection.recv()
    if rank == failing:
        if how == "raise":
            raise ValueError(f"the first error, on rank {rank}")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    time.sleep(0.2 if how == "raise" else 600)
    raise RuntimeError(f"an error that follows, on rank {rank}")


def cross(rank: int, connection: Connection, size: int, path: str, times: int) -> None:
    """Passes the barrier many times and sends, for each, when this rank arrived and when it went on."""
    barrier = SpinBarrier(path, rank, size)
    arrived, left = [], []
    for i in range(times):
        if i % size == rank:
            time.sleep(0.001)
        arrived.append(time.monotonic_ns())
        barrier()
        left.append(time.monotonic_ns())
    barrier.close()
    connection.send((arrived, left))


class FaultyGloo(ProcessGroupGloo):
    """Gloo whose all-reduce and all-gather spoil the last element on rank 1, and whose barrier is none."""

    def issue(self, call: Call) -> Work:
        if call.operation is BARRIER:
            return CompletedWork([])
        work = super().issue(call)
        if call.operation in {ALL_REDUCE, ALL_GATHER_INTO_TENSOR}:
            work.wait()
            if self.rank() == 1:
                call.output.view(-1)[-1] += 1
        return work


def create_faulty(store: Any, rank: int, size: int, timeout: timedelta) -> FaultyGloo:
    """Makes a group of the backend ``faulty``."""
    return FaultyGloo(GroupOptions(store, rank, size, timeout))


collectives.Backend.register_backend("faulty", create_faulty, devices="cpu")
collectives.Backend.register_backend("elsewhere", create_faulty, devices="cuda")
register_backend_spec(
    BackendSpec(
        "absent", ("cpu",), "no_such_module", ("no_such_package",), "python -m pip install no-such-package"
    )
)
