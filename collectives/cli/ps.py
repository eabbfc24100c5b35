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
import json
import sys
import threading
import time

from collectives.cli import CommandError
from collectives.cli.segments import Group, Job, Rank, running_jobs
from collectives.registry.capability_table import Table, plain_text

__all__ = ["add_arguments", "run"]

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
    rows = tuple(tuple(map(_printable, row)) for job in jobs for row in _rows(job, every_group))
    told = [_printable(line) for job in jobs for group in job.groups for line in _complaints(group)]
    return "\n".join([plain_text(Table(_HEADER, rows)), *told])


def _printable(text: str) -> str:
    """Returns a text of another process without what would command the terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


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
    """Returns what is to be told of a group: that it is broken, or who is missing."""
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


def _values(jobs: list[Job]) -> list[dict[str, object]]:
    return [
        {
            "job": job.name,
            "groups": [
                {
                    "label": group.label,
                    "failure": group.failure,
                    "ranks": [
                        {
                            "rank": r,
                            "world_rank": None if rank.process is None else job.world_rank(rank.process),
                            "process": None if rank.process is None else rank.process.pid,
                            "state": rank.state,
                            **{
                                name: rank.about[name]
                                for name in (
                                    "local",
                                    "sequence",
                                    "operation",
                                    "inside",
                                    "waits_for",
                                    "seconds",
                                    "message",
                                    "site",
                                )
                            },
                        }
                        for r, rank in enumerate(group.ranks)
                    ],
                }
                for group in job.groups
            ],
        }
        for job in jobs
    ]
