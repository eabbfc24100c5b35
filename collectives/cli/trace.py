"""Puts the flight records of several ranks together: where each rank was, a trace for viewers.

FILE is what ranks wrote: at their first error (COLLECTIVES_FLIGHT_RECORD_FILE), on a signal
(COLLECTIVES_FLIGHT_RECORD_SIGNAL), or by dump_flight_record.

Prints the last operation of every rank in every group, and who is behind. With --output, writes a trace for
https://ui.perfetto.dev or chrome://tracing, with the ranks' clocks aligned. With --torch, writes the files
that torch's analyzer of flight records takes:

    collectives trace flight_*.json --torch folder
    python -m torch.distributed.flight_recorder.fr_trace folder
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from collectives.cli import CommandError
from collectives.cli.flight_files import (
    FlightFile,
    Group,
    Operation,
    clock_offsets,
    read_files,
    write_for_torch,
)
from collectives.cli.output_files import output_file, output_folder
from collectives.errors import ranks_in_words
from collectives.registry.capability_table import Table, plain_text

__all__ = ["add_arguments", "chrome_trace", "run"]

_HEADER = ("GROUP", "RANK", "GLOBAL", "STATE", "FOR", "LAST OPERATION")
_COLOURS = {"failed": "terrible", "pending": "bad"}
"""Names of colours of the viewer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="the flight record of a rank")
    parser.add_argument("--output", "-o", metavar="FILE", type=output_file, help="write a trace for viewers")
    parser.add_argument(
        "--torch", metavar="FOLDER", type=output_folder, help="write the collectives for torch's analyzer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints where each rank was, and writes what is asked for; returns 0.

    Raises:
        CommandError: a file cannot be read or written, or is something else.
    """
    files = read_files(arguments.files)
    print(_text(files))
    try:
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(chrome_trace(files)), "utf-8")
        if arguments.torch is not None:
            write_for_torch(files, arguments.torch)
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be written: {error.strerror}") from None
    return 0


# ---- the table ---------------------------------------------------------------------------------------------


def _text(files: Sequence[FlightFile]) -> str:
    places: dict[tuple[str, tuple[int, ...]], list[tuple[FlightFile, Group]]] = {}
    for file in files:
        for group in file.groups:
            places.setdefault((group.name, group.global_ranks), []).append((file, group))
    rows = [_row(file, group) for members in places.values() for file, group in members]
    told = [line for members in places.values() for line in _behind([group for _, group in members])]
    printable = tuple(tuple(map(_printable, row)) for row in rows)
    return "\n".join([plain_text(Table(_HEADER, printable)), *map(_printable, told)])


def _printable(text: str) -> str:
    """Returns a text of a file without what would command the terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _row(file: FlightFile, group: Group) -> tuple[str, ...]:
    last = group.operations[-1] if group.operations else None
    return (
        f"{group.backend} group {group.name!r} of {len(group.global_ranks)}",
        str(group.rank),
        str(file.rank),
        "" if last is None else last.state,
        "" if last is None else f"{(file.monotonic - (last.ended or last.began)) / 1e9:.1f} s",
        "none" if last is None else str(last) + (f", called at {last.site}" if last.site else ""),
    )


def _behind(members: Sequence[Group]) -> Iterator[str]:
    """Yields a line where some ranks have begun a collective that others have not."""
    latest: dict[int, Operation | None] = {}
    for group in members:
        collectives = [one for one in group.operations if not one.is_message]
        latest[group.rank] = max(collectives, key=lambda one: one.number, default=None)
    newest = max((one for one in latest.values() if one), key=lambda one: one.number, default=None)
    if newest is None:
        return
    late = [rank for rank, one in latest.items() if one is None or one.number < newest.number]
    first = members[0]
    silent = [rank for rank in range(len(first.global_ranks)) if rank not in latest]
    for ranks, what in ((late, "had not begun"), (silent, "wrote no file that tells whether they began")):
        if ranks:
            yield f"{first.backend} group {first.name!r}: {ranks_in_words(sorted(ranks))} {what} {newest}"


# ---- the trace ---------------------------------------------------------------------------------------------


def chrome_trace(files: Sequence[FlightFile]) -> dict[str, Any]:
    """Returns the operations of all ranks in the format of Chrome's trace viewer, which Perfetto reads.

    Each rank is a process, each group a thread; operations that overlap lie on threads of their own.

    Args:
        files: the files of all ranks.
    """
    offsets = clock_offsets(files)
    began = [
        one.began + offsets[file.boot] for file in files for group in file.groups for one in group.operations
    ]
    origin = min(began, default=0)
    events: list[dict[str, Any]] = []
    for file in files:
        name = f"rank {file.rank} (process {file.process} on {file.host})"
        events.append(_about("process_name", file.rank, 0, name=name))
        events.append(_about("process_sort_index", file.rank, 0, sort_index=file.rank))
        thread = 1
        for group in file.groups:
            lanes = _lanes(group.operations)
            for lane, operations in enumerate(lanes):
                label = f"{group.backend} {group.name}" + (f" ({lane + 1})" if lane else "")
                events.append(_about("thread_name", file.rank, thread, name=label))
                events.append(_about("thread_sort_index", file.rank, thread, sort_index=thread))
                shift = offsets[file.boot] - origin
                events += [_event(file, group, one, thread, shift) for one in operations]
                thread += 1
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"origin_ns": str(origin), **{f"rank {file.rank}": file.reason for file in files}},
    }


def _lanes(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Divides operations into rows in which none overlap."""
    lanes: list[list[Operation]] = []
    for one in sorted(operations, key=lambda one: one.began):
        for lane in lanes:
            end = lane[-1].ended
            if end is not None and end <= one.began:
                lane.append(one)
                break
        else:
            lanes.append([one])
    return lanes


def _about(kind: str, rank: int, thread: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": values}


def _event(file: FlightFile, group: Group, one: Operation, thread: int, shift: int) -> dict[str, Any]:
    end = file.monotonic if one.ended is None else one.ended
    event = {
        "ph": "X",
        "name": one.name if one.state == "done" else f"{one.name} ({one.state})",
        "cat": group.backend,
        "pid": file.rank,
        "tid": thread,
        "ts": (one.began + shift) / 1000,
        "dur": max(end - one.began, 0) / 1000,
        "args": {
            "number": one.number,
            "group": group.name,
            "group rank": group.rank,
            "detail": one.detail,
            "shape": None if one.shape is None else list(one.shape),
            "dtype": one.dtype,
            "bytes": one.nbytes,
            "error": one.error,
            "called at": one.site,
        },
    }
    if one.state in _COLOURS:
        event["cname"] = _COLOURS[one.state]
    return event
