"""The groups of the host backend on this machine, found and read from outside; their ranks are not asked.

The ranks of a group on one machine share a segment of memory, which says of each of them where it is. It has
no name, but whoever may look at a rank's descriptors, which are its own user and root, can open it there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import collectives._native as _native
from collectives.errors import DistBackendError

__all__ = ["Group", "Job", "Process", "Rank", "running_jobs"]

_LINK = "/memfd:collectives (deleted)"
_STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "D": "in the kernel"}
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Process:
    """A process of this machine that holds segments.

    Attributes:
        pid: its id, as this process sees it.
        own_pid: its id, as it sees itself.
        space: number of the namespace in which that is its id.
        state: ``running``, ``stopped``, ``dead`` or ``in the kernel`` (which no signal ends).
        job: what its launcher calls the job; empty where it does not.
    """

    pid: int
    own_pid: int
    space: int
    state: str
    job: str


@dataclass(frozen=True)
class Rank:
    """A rank of a group.

    Attributes:
        process: its process; ``None`` for one on another machine, or one that has ended.
        about: what the segment says of it, see ``_native.observe_segment``.
    """

    process: Process | None
    about: dict[str, Any]

    @property
    def state(self) -> str:
        """What can be told of its process."""
        if self.process is not None:
            return self.process.state
        presence = ("not there yet", "running", "has left", "dead", "unreachable")
        told = presence[min(self.about["presence"], len(presence) - 1)]
        return "dead" if self.about["local"] and told == "running" else told


@dataclass(frozen=True)
class Group:
    """A group.

    Attributes:
        label: its backend, name and size.
        failure: why it is broken; ``None`` for a group that works.
        ranks: its ranks, in order.
    """

    label: str
    failure: str | None
    ranks: list[Rank]


@dataclass(frozen=True)
class Job:
    """Groups whose ranks are connected.

    Attributes:
        name: what the launcher calls it, else the lowest process id.
        groups: its groups, the largest first.
    """

    name: str
    groups: list[Group]

    def processes(self) -> set[int]:
        """Returns the ids of its processes on this machine."""
        return {rank.process.pid for group in self.groups for rank in group.ranks if rank.process}

    def world_rank(self, process: Process) -> int:
        """Returns the rank of a process in the job's largest group that it is a member of."""
        return next(
            r for group in self.groups for r, rank in enumerate(group.ranks) if rank.process == process
        )


def running_jobs() -> list[Job]:
    """Returns the jobs on this machine that this user may look at."""
    groups: list[Group] = []
    for path, holders in _segments():
        with contextlib.suppress(
            OSError, DistBackendError
        ):  # it has ended meanwhile, or is another version's
            groups.append(_group(path, holders))
    jobs: list[tuple[set[int], list[Group]]] = []
    for group in groups:
        processes = {rank.process.pid for rank in group.ranks if rank.process}
        together = [job for job in jobs if job[0] & processes]
        jobs = [job for job in jobs if not job[0] & processes]
        jobs.append(
            (
                processes.union(*(job[0] for job in together)),
                [*(g for job in together for g in job[1]), group],
            )
        )
    return sorted((_job(groups) for processes, groups in jobs if processes), key=lambda job: job.name)


def _job(groups: list[Group]) -> Job:
    ordered = sorted(groups, key=lambda group: (-len(group.ranks), group.label))
    processes = [rank.process for group in groups for rank in group.ranks if rank.process]
    first = min(processes, key=lambda process: process.pid)
    return Job(first.job or str(first.pid), ordered)


def _segments() -> Iterator[tuple[Path, list[Process]]]:
    """Yields a path to open each segment by, and the processes that hold it."""
    found: dict[tuple[int, int], tuple[Path, dict[int, Process]]] = {}
    for link in _descriptors():
        with contextlib.suppress(OSError):  # another user's, or its process ends
            if str(link.readlink()) == _LINK:
                about = link.stat()
                pid = int(link.parts[2])
                _, holders = found.setdefault((about.st_dev, about.st_ino), (link, {}))
                holders[pid] = holders.get(pid) or _process(pid)
    for link, holders in found.values():
        yield link, list(holders.values())


def _descriptors() -> Iterator[Path]:
    """Yields the links to all open files that this user may look at."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            yield from (process / "fd").iterdir()


def _process(pid: int) -> Process:
    folder = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text("utf-8", "replace").splitlines()
    )
    job = ""
    with contextlib.suppress(OSError):
        words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        environment = dict(word.split("=", 1) for word in words if "=" in word)
        names = (environment.get(variable, "") for variable in _JOB_VARIABLES)
        job = next((name for name in names if name not in {"", "none"}), "")
    own_pid = int(status.get("NSpid", str(pid)).split()[-1])
    space = (folder / "ns/pid").stat().st_ino
    return Process(pid, own_pid, space, _STATES.get(status["State"].split()[0], "running"), job)


def _group(path: Path, holders: list[Process]) -> Group:
    # By now it may be anything: a pipe that would be waited for, a terminal.
    file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        about = _native.observe_segment(file_descriptor)
    finally:
        os.close(file_descriptor)
    by_id = {(process.space, process.own_pid): process for process in holders}
    ranks = [
        Rank(by_id.get((rank["process_space"], rank["process"])) if rank["local"] else None, rank)
        for rank in about["ranks"]
    ]
    return Group(about["label"], about["failure"], ranks)
