"""The ranks that measure cells: processes that this one starts, or those that a launcher started.

Under ``torchrun``, ``mpirun`` or ``srun`` every process is a rank, on as many machines as the launcher spans;
rank 0 leads. Without a launcher the leader starts the ranks on this machine, under ``mpirun`` where a backend
asks for it, or in network namespaces that play machines.
"""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist

import collectives
from collectives.bench.comparison.peers import TORCH
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.ranks import TIMEOUT, Placement, new_group
from collectives.bench.paper.cells import Cell, Place
from collectives.cli import CommandError, mpi_job
from collectives.ddp.default_group import resolve_group
from collectives.ranks.processes import RankFailedError, commands
from collectives.store import PrefixStore

LEADER_LIMIT = timedelta(hours=2)
"""How long ranks of a launcher wait for the next cell."""

_SRUN_PORT = 29500


class Team(Protocol):
    """Ranks that measure cells."""

    def ask(self, command: Any) -> list[Any]:
        """Has a cell measured within a budget; returns what :func:`_carry_out` does, by rank.

        Raises:
            RankFailedError: a rank failed.
        """


def serve(rank: int, connection: Connection, placement: Placement) -> None:
    """Body of a rank: answers every order until the parent closes."""
    placement.take(rank)
    placement.initialize(rank, "host")
    for cell, budget_s in commands(connection):
        connection.send(_carry_out(cell, budget_s))
    _leave()


class LaunchedTeam:
    """This process and all others that a launcher started; a context manager, made by every one of them.

    Args:
        device: type of the device.

    Attributes:
        leads: whether this process is rank 0, which alone calls :meth:`ask`; the others call :meth:`follow`.
    """

    def __init__(self, device: str) -> None:
        _read_srun()
        local = {name: os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        torch.set_num_threads(1)
        method = "mpi://" if mpi_job.current() is not None and "RANK" not in os.environ else "env://"
        collectives.init_process_group("host", init_method=method, timeout=LEADER_LIMIT)
        self._rank, self._size = collectives.get_rank(), collectives.get_world_size()
        names: list[Any] = [None] * self._size
        collectives.all_gather_object(names, os.uname().nodename)
        beside = [other for other, name in enumerate(names) if name == names[self._rank]]
        place, count = beside.index(self._rank), len(beside)
        if all(text.isdecimal() for text in local.values()):
            place, count = int(local["LOCAL_RANK"]), int(local["LOCAL_WORLD_SIZE"])
        DEVICES[device].take(place, count)
        self.leads = self._rank == 0

    def __enter__(self) -> LaunchedTeam:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Ends the world; the leader tells the others first, unless it failed."""
        if kind is None and self.leads:
            collectives.broadcast_object_list([None], src=0)
        elif kind is not None and collectives.is_initialized():
            resolve_group(None).abort()  # else the others would wait for this rank's next word
        _leave()

    def ask(self, command: Any) -> list[Any]:
        """Returns the answers of all ranks, this one's too."""
        with self._naming_the_rank():
            collectives.broadcast_object_list([command], src=0)
            answers: list[Any] = [None] * self._size
            collectives.gather_object(_carry_out(*command), answers, dst=0)
        return answers

    def follow(self) -> None:
        """Measures what the leader asks for, until it closes.

        Raises:
            RankFailedError: this rank failed, or another did.
        """
        while True:
            told: list[Any] = [None]
            with self._naming_the_rank():
                collectives.broadcast_object_list(told, src=0)
                if told[0] is None:
                    return
                collectives.gather_object(_carry_out(*told[0]), None, dst=0)

    @contextmanager
    def _naming_the_rank(self) -> Iterator[None]:
        """Context that tells errors as those of this rank; those that another rank caused in a line."""
        try:
            yield
        except (collectives.GroupAbortedError, collectives.PeerLostError) as error:
            raise RankFailedError(f"rank {self._rank} ended with another: {error}", self._rank) from error
        except Exception as error:
            text = f"rank {self._rank} failed:\n\n{traceback.format_exc()}"
            raise RankFailedError(text, self._rank) from error


def launched_ranks() -> int | None:
    """Returns how many ranks a launcher started, this process among them; ``None`` without one."""
    if all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return int(os.environ["WORLD_SIZE"])
    steps = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if steps.isdecimal() and int(steps) > 1 and os.environ.get("SLURM_PROCID", "").isdecimal():
        return int(steps)
    job = mpi_job.current()
    return None if job is None else job.size


def is_first() -> bool:
    """Returns whether this process is a launcher's first one, which alone writes files and prints."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    job = mpi_job.current()
    return rank in {None, "0"} and (job is None or job.rank == 0)


def _read_srun() -> None:
    """Tells the rendezvous what ``srun`` tells this process, unless another launcher did.

    Raises:
        CommandError: the nodes of the step cannot be read.
    """
    step = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in os.environ or mpi_job.current() is not None or not step.isdecimal():
        return
    os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": step}
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    job = int(os.environ.get("SLURM_JOB_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(_SRUN_PORT + job % 1000))
    if "MASTER_ADDR" not in os.environ:
        words = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
        try:
            found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise CommandError(
                f"cannot find the first node of this srun ({error}); set MASTER_ADDR to its address"
            ) from error
        os.environ["MASTER_ADDR"] = found[0]


# ---- on every rank -------------------------------------------------------------------------------------


def _carry_out(cell: Cell, budget_s: float) -> Any:
    """Returns what this rank measured, ``None`` where the cell leaves it out; called by all ranks."""
    rank, members = collectives.get_rank(), list(range(cell.ranks))
    with _groups(("host", *cell.groups), members) as (own, *groups):
        if rank not in members:
            return None
        place = Place(rank, DEVICES[cell.device], dict(zip(cell.groups, groups, strict=True)), own)
        return cell.measure(place, budget_s)


@contextmanager
def _groups(names: Sequence[str], members: list[int]) -> Iterator[list[Any]]:
    """Context with groups of some ranks; called by all ranks."""
    made = [_torch_group(name, members) if name.startswith(TORCH) else new_group(name, members)
            for name in names]  # fmt: skip
    try:
        yield made
    except BaseException:  # the others of the cell are told at once, and not by their time limit
        for group in made:
            with suppress(Exception):
                group.abort()
        raise
    if collectives.get_rank() in members:
        for name, group in zip(names, made, strict=True):
            (torch_dist if name.startswith(TORCH) else collectives).destroy_process_group(group)


def _torch_group(name: str, members: list[int]) -> Any:
    if not torch_dist.is_initialized():
        store = PrefixStore("torch", resolve_group(None).get_group_store())
        torch_dist.init_process_group(
            "gloo",
            store=store,
            rank=collectives.get_rank(),
            world_size=collectives.get_world_size(),
            timeout=TIMEOUT,
        )
    return torch_dist.new_group(members, backend=name.removeprefix(TORCH), timeout=TIMEOUT)


def _leave() -> None:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    collectives.destroy_process_group()
