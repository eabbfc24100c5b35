"""Ranks that ``mpirun`` starts, and the choice between those and spawned ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from collectives.ranks.processes import CommandRanks, RankProcesses, SpawnedRanks, work_of

_NEEDS_MPIRUN = "mpi"

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def needs_mpirun(name: str) -> bool:
    """Returns whether only ``mpirun`` can start ranks for a backend, or for a peer over it (``mpi:ring``)."""
    return name.partition(":")[0] == _NEEDS_MPIRUN


@dataclass(frozen=True, slots=True)
class Mpirun:
    """The program of one MPI that starts ranks.

    Attributes:
        program: its path.
        variables: what ranks need in their environment.
        before: words in front of the program.
        words: its words beside the number of ranks and their command.
    """

    program: str
    variables: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def command(self, ranks: int, *words: str) -> list[str]:
        """Returns the command that starts so many ranks with these words."""
        return [*self.before, self.program, *self.words, "-n", str(ranks), *words]

    def environment(self, ranks: int) -> Mapping[str, str]:
        """Returns the environment of so many ranks, of whatever MPI.

        Unless told, Open MPI refuses root and more ranks than cores, and Intel's binds several ranks to a
        core.
        """
        extra = dict(self.variables)
        if os.geteuid() == 0:
            extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if ranks > len(os.sched_getaffinity(0)):
            extra |= {
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
                "OMPI_MCA_mpi_yield_when_idle": "1",  # which it sees for itself on one machine alone
                "I_MPI_PIN": "0",
            }
        return {**os.environ, **extra}

    def between(self, machines: Sequence[str], own: str, agent: str, ranks: int) -> Mpirun:
        """Returns the same program for ranks on machines that namespaces play, equally many on each.

        The program runs under ``own`` as the name of its machine, because Intel's has daemons connect to that
        name. It reaches the daemons, and the ranks each other, over the network of that address alone.

        Args:
            machines: their addresses; IPv4 with a network of 24 bits.
            own: address of the machine that the program runs on, in that network.
            agent: a program that is called as ``ssh`` is, with an address and a command.
            ranks: number of ranks.

        Raises:
            subprocess.TimeoutExpired: the program does not tell its version within a minute.
        """
        said = subprocess.run(  # noqa: S603 - the installation of the caller
            [self.program, "--version"],
            env=self.environment(1),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        ).stdout
        share = ranks // len(machines)
        if "Open MPI" in said:
            network = f"{own.rpartition('.')[0]}.0/24"
            words: tuple[str, ...] = (
                *("--host", ",".join(f"{name}:{share}" for name in machines)),
                *("--map-by", f"ppr:{share}:node:oversubscribe"),
                *("--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", network),
                *("--mca", "btl_tcp_if_include", network),
            )
        else:  # the program of MPICH, hydra, of which Intel's is a kin
            launcher = "bootstrap" if "Intel" in said else "launcher"
            words = (
                *("-hosts", ",".join(machines), "-ppn", str(share), "-localhost", own),
                *(f"-{launcher}", "ssh", f"-{launcher}-exec", agent),
            )
        renamed = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', own)
        # MPICH's UCX finds that the machines share a kernel and passes messages through its memory.
        variables = {**self.variables, "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        return replace(self, before=renamed, words=words, variables=variables)


def find_mpirun(prefix: str | None = None) -> Mpirun | None:
    """Returns the program that starts ranks; ``None`` without one.

    Args:
        prefix: folder of an installation of MPI with ``bin`` and ``lib``, of which both the program and the
            library are taken; ``None`` takes the program beside the interpreter or in PATH, and mpi4py finds
            the library.
    """
    if prefix is None:
        folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    else:
        folders = str(Path(prefix, "bin"))
    program = shutil.which("mpirun", path=folders) or shutil.which("mpiexec", path=folders)
    if program is None or prefix is None:
        return None if program is None else Mpirun(program)
    folder = Path(prefix, "lib")
    libraries = sorted(folder.glob("libmpi.so.*"), key=lambda file: len(file.name))
    if not libraries:
        return None
    found = {"PATH": folders, "LD_LIBRARY_PATH": str(folder)}
    extended = {
        name: os.pathsep.join([new, *filter(None, [os.environ.get(name)])]) for name, new in found.items()
    }
    if any(folder.glob("lib*-fi.so")):  # providers of Intel's libfabric, which looks for them elsewhere
        extended["FI_PROVIDER_PATH"] = str(folder)
    return Mpirun(program, {"MPI4PY_LIBMPI": str(libraries[0]), **extended})


def world_rank() -> int:
    """Returns this process's rank in the job of ``mpirun``, before MPI has started."""
    return int(next(os.environ[name] for name in _RANK_VARIABLES if name in os.environ))


def start_ranks(
    backends: Sequence[str],
    size: int,
    body: Callable[..., None],
    args: tuple[Any, ...],
    mpirun: Mpirun | None = None,
) -> RankProcesses:
    """Returns ranks that run ``body(rank, connection, *args)``, then wait for the parent to close.

    Args:
        backends: names of the backends that they use, or of peers that reduce over those (``mpi:ring``).
        size: number of ranks.
        body: function at the top level of a module.
        args: its further arguments; pickled.
        mpirun: what starts them where a backend needs it; ``None`` for that of :func:`find_mpirun`.

    Raises:
        RankFailedError: they could not be started.
        FileNotFoundError: a backend needs ``mpirun``, and there is none.
    """
    if not any(map(needs_mpirun, backends)):
        return SpawnedRanks(size, body, args)
    mpirun = mpirun or find_mpirun()
    if mpirun is None:
        raise FileNotFoundError("there is no mpirun")
    # The module mpi4py aborts all ranks where one raises; otherwise that one waits for the others at its end.
    command = mpirun.command(size, sys.executable, "-m", "mpi4py", "-m", "collectives.ranks.launched")
    return CommandRanks(size, command, mpirun.environment(size), work_of(body, args))
