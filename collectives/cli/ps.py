"""Shows what every rank of the jobs on this machine does now, also of ranks that hang or are stopped.

Asks no rank anything: all is read from the memory that the ranks of a group of the host backend share (groups
of other backends do not show). Jobs of other users show to root only. Ranks on other machines are shown as
their machines have told last: run it there for more.

A line is a process, in the group where it waits, or was last active; with --all, a line for each group. RANK
counts in the largest group of the process, which is the job's world. A group of which some ranks wait in a
collective that others have not begun is told below, with those ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import collectives._native as _native
from collectives.cli import CommandError, printable
from collectives.cli.tables import plain_text
from collectives.errors import DistBackendError

_HEADER = ("JOB", "RANK", "PROCESS", "STATE", "FOR", "DOES", "GROUP", "AT")
_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument("--job", metavar="ID", help="only the job of this name, or with a process of this id")
    parser.add_argument("--all", action="store_true", help="a line for every rank of every group")
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=1.0,
        metavar="SECONDS",
        help="again and again, until interrupted; 1 second apart without a number",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables; returns 0.

    Raises:
        CommandError: there is no such job.
    """
    if arguments.watch is not None and not 0 < arguments.watch < threading.TIMEOUT_MAX:
        raise CommandError(f"--watch needs a number of seconds above 0, not {arguments.watch:g}")
    while True:
        jobs = [job for job in running_jobs() if _is_wanted(job, arguments.job)]
        if arguments.watch is None and not jobs:
            which = f" {arguments.job!r}" if arguments.job else ""
            raise CommandError(
                f"no job{which} of this user with groups of the host backend runs on this machine"
            )
        text = json.dumps(_values(jobs), indent=1) if arguments.json else _text(jobs, arguments.all)
        clear = _CLEAR if arguments.watch is not None and sys.stdout.isatty() else ""
        print(clear + text, flush=True)
        if arguments.watch is None:
            return 0
        time.sleep(arguments.watch)


def _is_wanted(job: Job, name: str | None) -> bool:
    return name is None or name == job.name or (name.isdecimal() and int(name) in job.processes())


def _text(jobs: list[Job], every_group: bool) -> str:
    rows = [[*map(printable, row)] for job in jobs for row in _rows(job, every_group)]
    told = [printable(line) for job in jobs for group in job.groups for line in _complaints(group)]
    return "\n".join([plain_text([_HEADER, *rows]), *told])


def _rows(job: Job, every_group: bool) -> list[tuple[str, ...]]:
    places = [(group, r, rank) for group in job.groups for r, rank in enumerate(group.ranks)]
    if not every_group:
        latest: dict[object, tuple[Group, int, Rank]] = {}
        for place in places:
            rank = place[2]
            key = rank.process or (id(place[0]), place[1])
            if key not in latest or _urgency(rank) > _urgency(latest[key][2]):
                latest[key] = place
        largest = job.groups[0]
        # Ranks without a process here: only in the world, of which they are.
        places = [place for place in latest.values() if place[2].process or place[0] is largest]
    rows = [_row(job, *place) for place in places]
    return rows if every_group else sorted(rows, key=lambda row: int(row[1]))


def _urgency(rank: Rank) -> tuple[bool, bool, float]:
    """Orders the groups of one process: where it waits comes before where it was active last."""
    waits = rank.about["inside"] or rank.about["message"] is not None
    return waits, rank.about["operation"] is not None, -_seconds(rank)


def _seconds(rank: Rank) -> float:
    message = rank.about["message"]
    return float(message["seconds"] if message else rank.about["seconds"])


def _row(job: Job, group: Group, number: int, rank: Rank) -> tuple[str, ...]:
    process = rank.process
    return (
        job.name,
        str(number if process is None else job.world_rank(process)),
        "" if process is None else str(process.pid),
        rank.state,
        f"{_seconds(rank):.1f} s" if rank.about["operation"] or rank.about["message"] else "",
        _activity(rank),
        group.label if len(job.groups) == 1 or process is None else f"{group.label}, rank {number}",
        rank.about["site"],
    )


def _activity(rank: Rank) -> str:
    about = rank.about
    message = about["message"]
    if message:
        what = "sends to" if message["sends"] else "receives from"
        peer = "any rank" if message["peer"] is None else f"rank {message['peer']}"
        return f"{what} {peer}, tag {message['tag']}"
    if about["operation"] is None:
        return "no collective yet"
    text = f"{about['operation']} number {about['sequence']}"
    if not about["inside"]:
        return f"after {text}"
    waits_for = about["waits_for"]
    return f"in {text}" + ("" if waits_for is None else f", waits for rank {waits_for}")


def _complaints(group: Group) -> list[str]:
    """Returns a group's state in words: that it is broken, or which ranks are missing."""
    if group.failure is not None:
        return [f"{group.label} is broken: {group.failure}"]
    waiting = [rank for rank in group.ranks if rank.about["inside"] and rank.about["waits_for"] is not None]
    if not waiting:
        return []
    latest = max(waiting, key=lambda rank: rank.about["sequence"])
    number = latest.about["sequence"]
    missing = [f"{r} ({rank.state})" for r, rank in enumerate(group.ranks) if rank.about["sequence"] < number]
    if not missing:
        return []
    ranks = "rank" if len(missing) == 1 else "ranks"
    return [
        f"{group.label}: {latest.about['operation']} number {number} waits for {ranks} {', '.join(missing)}"
    ]


_TOLD = ("local", "sequence", "operation", "inside", "waits_for", "seconds", "message", "site")
"""What a segment says of a rank, for JSON."""


def _values(jobs: list[Job]) -> list[dict[str, object]]:
    def group_values(job: Job, group: Group) -> dict[str, object]:
        ranks = [rank_values(job, r, rank) for r, rank in enumerate(group.ranks)]
        return {"label": group.label, "failure": group.failure, "ranks": ranks}

    def rank_values(job: Job, number: int, rank: Rank) -> dict[str, object]:
        process = rank.process
        return {
            "rank": number,
            "world_rank": None if process is None else job.world_rank(process),
            "process": None if process is None else process.pid,
            "state": rank.state,
            **{name: rank.about[name] for name in _TOLD},
        }

    return [{"job": job.name, "groups": [group_values(job, group) for group in job.groups]} for job in jobs]


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
