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
import dataclasses
import json
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from collectives.cli import CommandError, printable
from collectives.cli.output_files import output_file, output_folder
from collectives.cli.tables import plain_text
from collectives.core.recording.dump import FORMAT
from collectives.errors import ranks_in_words

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


# ---- the files ---------------------------------------------------------------------------------------------

_END_TOGETHER = ("all_", "barrier", "reduce_scatter")

_T = TypeVar("_T")


def _field(convert: Callable[[Any], object], key: str = "") -> Any:
    """Returns a field that is an entry of a file: under that key, else under the field's name."""
    return dataclasses.field(metadata={"convert": convert, "key": key})


def _generation(given: Any) -> int:
    """Reads how often a group had taken other members; a group that never did so may not say it."""
    return 0 if given is None else int(given)


def _each(kind: type[_T], given: Sequence[Any]) -> tuple[_T, ...]:
    """Returns an object for each of several parts of a file, made of its entries."""
    about = [(one.name, *one.metadata.values()) for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return tuple(
        kind(**{name: convert(_entry_of(values, key or name)) for name, convert, key in about})
        for values in given
    )


def _entry_of(values: Any, key: str) -> Any:
    return values.get(key) if key == "generation" else values[key]


@dataclass(frozen=True)
class Operation:
    """An operation as a rank recorded it.

    Attributes:
        number: its number within the group, messages apart from collectives.
        name: name of the function.
        detail: reduction, root or peer.
        shape: shape of its first tensor; ``None`` where it has none.
        dtype: data type of that tensor.
        nbytes: bytes of its tensors.
        timeout: its time limit, in seconds.
        state: ``pending``, ``done`` or ``failed``.
        began: when it began, on the monotonic clock of the rank's machine, in nanoseconds.
        ended: when it ended; ``None`` for a pending one.
        error: why it failed.
        site: the source line that issued it, where that is known.
        generation: how often the group had taken other members then.
    """

    number: int = _field(int)
    name: str = _field(str)
    detail: str = _field(str)
    shape: tuple[int, ...] | None = _field(lambda given: None if given is None else tuple(map(int, given)))
    dtype: str = _field(str)
    nbytes: int = _field(int, "bytes")
    timeout: float = _field(float, "timeout_seconds")
    state: str = _field(str)
    began: int = _field(int, "began_ns")
    ended: int | None = _field(lambda given: None if given is None else int(given), "ended_ns")
    error: str = _field(str)
    site: str = _field(str)
    generation: int = _field(_generation)

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks."""
        return self.name in {"send", "recv"}

    def __str__(self) -> str:
        tensor = "" if self.shape is None else f"{self.dtype} {list(self.shape)}"
        about = ", ".join(part for part in (self.detail, tensor) if part)
        return f"{self.name} #{self.number}" + (f" ({about})" if about else "")


@dataclass(frozen=True)
class Group:
    """A group as one of its ranks recorded it.

    Attributes:
        name: its name.
        description: free text.
        backend: its backend.
        rank: the rank within the group.
        global_ranks: ranks of the members in the default group, by group rank.
        operations: the last ones, in the order in which they began.
        generation: how often it has taken other members, with each of which operations count anew.
    """

    name: str = _field(str)
    description: str = _field(str)
    backend: str = _field(str)
    rank: int = _field(int)
    global_ranks: tuple[int, ...] = _field(lambda given: tuple(map(int, given)))
    operations: tuple[Operation, ...] = _field(lambda given: _each(Operation, given))
    generation: int = _field(_generation)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.global_ranks):
            raise ValueError(f"rank {self.rank} in a group of {len(self.global_ranks)}")

    @property
    def collectives(self) -> list[Operation]:
        """The collectives among the operations of the members that it has now."""
        return [one for one in self.operations if one.generation == self.generation and not one.is_message]


@dataclass(frozen=True)
class FlightFile:
    """What one rank wrote.

    Attributes:
        rank: the rank in the default group.
        process: its process.
        host: name of its machine.
        boot: what tells the machine.
        reason: why it wrote.
        monotonic: the monotonic clock when it wrote, in nanoseconds.
        time: the wall clock then, in nanoseconds since 1970.
        groups: its groups, in the order in which they were made.
    """

    rank: int = _field(int)
    process: int = _field(int)
    host: str = _field(str)
    boot: str = _field(str)
    reason: str = _field(str)
    monotonic: int = _field(int, "monotonic_ns")
    time: int = _field(int, "time_ns")
    groups: tuple[Group, ...] = _field(lambda given: _each(Group, given))


def read_files(paths: Sequence[Path]) -> list[FlightFile]:
    """Returns what the files of several ranks hold, by rank.

    Raises:
        CommandError: one cannot be read, is something else, or is of a rank that has another one.
    """
    found: dict[int, tuple[Path, FlightFile]] = {}
    for path in paths:
        file = _read(path)
        if file.rank in found:
            raise CommandError(
                f"{found[file.rank][0]} and {path} are both of rank {file.rank}; name those of one run only"
            )
        found[file.rank] = path, file
    return [found[rank][1] for rank in sorted(found)]


def _read(path: Path) -> FlightFile:
    try:
        values = json.loads(path.read_text("utf-8"))
        if values["format"] != FORMAT:
            raise CommandError(
                f"{path} has the format {values['format']!r}, but this version reads {FORMAT!r}"
            )
        return _each(FlightFile, [values])[0]
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CommandError(
            f"{path} is no flight record: {type(error).__name__}: {error}; files are written by "
            "dump_flight_record, and as COLLECTIVES_FLIGHT_RECORD_FILE says"
        ) from None


def clock_offsets(files: Sequence[FlightFile]) -> dict[str, int]:
    """Returns what to add to the monotonic clock of each machine, by ``boot``, for one time axis.

    Ranks of one machine share its monotonic clock, so that their times compare to the nanosecond. Machines
    are put together by their wall clocks first. Those may be milliseconds apart; so what is left is taken
    from the operations that no rank leaves before all have come, which end everywhere at nearly the same
    time.

    Args:
        files: the files of all ranks; the first one's wall clock is the axis.
    """
    offsets: dict[str, int] = {}
    for file in files:
        offsets.setdefault(file.boot, file.time - file.monotonic)
    reference = files[0].boot
    ends = {boot: _ends(files, boot, offset) for boot, offset in offsets.items()}
    for boot in offsets:
        apart = [ends[reference][key] - end for key, end in ends[boot].items() if key in ends[reference]]
        if apart:
            offsets[boot] += round(median(apart))
    return offsets


def _ends(files: Sequence[FlightFile], boot: str, offset: int) -> dict[tuple[str, int, str, int], float]:
    """Returns when operations of all ranks ended on a machine."""
    found: dict[tuple[str, int, str, int], list[int]] = defaultdict(list)
    for file in files:
        if file.boot != boot:
            continue
        for group in file.groups:
            for one in group.operations:
                if one.name.startswith(_END_TOGETHER) and one.state == "done" and one.ended is not None:
                    found[group.name, one.generation, one.name, one.number].append(one.ended + offset)
    return {key: median(times) for key, times in found.items()}


# ---- the table ---------------------------------------------------------------------------------------------


def _text(files: Sequence[FlightFile]) -> str:
    places: dict[tuple[str, tuple[int, ...]], list[tuple[FlightFile, Group]]] = {}
    for file in files:
        for group in file.groups:
            places.setdefault((group.name, group.global_ranks), []).append((file, group))
    rows = [_row(file, group) for members in places.values() for file, group in members]
    told = [line for members in places.values() for line in _behind([group for _, group in members])]
    shown = [[*map(printable, row)] for row in rows]
    return "\n".join([plain_text([_HEADER, *shown]), *map(printable, told)])


def _row(file: FlightFile, group: Group) -> tuple[str, ...]:
    last = group.operations[-1] if group.operations else None
    return (
        f"{group.backend} group {group.name!r} of {len(group.global_ranks)}"
        + (f", generation {group.generation}" if group.generation else ""),
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
        latest[group.rank] = max(group.collectives, key=lambda one: one.number, default=None)
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


# ---- the files of torch's analyzer -------------------------------------------------------------------------

_VERSION = "2.10"
"""Of torch's format."""

_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}
_STATES = {"pending": "started", "done": "completed", "failed": "started"}

_Place = tuple[str, tuple[int, ...]]


def write_for_torch(files: Sequence[FlightFile], folder: Path) -> None:
    """Writes a file for each rank, ``flight_0`` and so on, which the analyzer takes together.

    Args:
        files: the files of all ranks.
        folder: made where it is missing.

    Raises:
        OSError: it cannot be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = _first_numbers(files)
    for file in files:
        with (folder / f"flight_{file.rank}").open("wb") as output:
            pickle.dump(_record(file, first), output)


def _first_numbers(files: Sequence[FlightFile]) -> dict[_Place, int]:
    """Returns of each group the first collective that the rings of all ranks still hold.

    The analyzer would miss earlier ones on those ranks that have dropped them.
    """
    first: dict[_Place, int] = {}
    for file in files:
        for group in file.groups:
            numbers = [one.number for one in group.collectives]
            place = group.name, group.global_ranks
            first[place] = max(first.get(place, 0), min(numbers, default=0))
    return first


def _record(file: FlightFile, first: dict[_Place, int]) -> dict[str, Any]:
    chosen = [
        (group, one)
        for group in file.groups
        for one in group.collectives
        if one.number >= first[group.name, group.global_ranks]
    ]
    chosen.sort(key=lambda pair: pair[1].began)
    return {
        "version": _VERSION,
        "pg_config": {
            group.name: {
                "name": group.name,
                "desc": group.description,
                "ranks": str(list(group.global_ranks)),
            }
            for group in file.groups
        },
        "pg_status": {},
        "entries": [_entry(number, group, one, file) for number, (group, one) in enumerate(chosen)],
    }


def _entry(record: int, group: Group, one: Operation, file: FlightFile) -> dict[str, Any]:
    given, got = _sizes(one, len(group.global_ranks))
    backend = "nccl" if group.backend == "nccl" else "gloo"
    wall = file.time - file.monotonic
    return {
        "record_id": record,
        "pg_id": file.groups.index(group),
        "process_group": (group.name, group.description),
        "collective_seq_id": one.number,
        "p2p_seq_id": 0,
        "op_id": one.number,
        "is_p2p": False,
        "profiling_name": f"{backend}:{_NAMES.get(one.name, one.name)}",
        "time_created_ns": one.began + wall,
        "time_discovered_started_ns": one.began + wall,
        "time_discovered_completed_ns": None if one.ended is None else one.ended + wall,
        "duration_ms": None if one.ended is None else (one.ended - one.began) / 1e6,
        "input_sizes": given,
        "input_dtypes": [one.dtype] * len(given),
        "output_sizes": got,
        "output_dtypes": [one.dtype] * len(got),
        "state": _STATES.get(one.state, one.state),
        "retired": one.ended is not None,
        "timeout_ms": round(one.timeout * 1000),
        "frames": [],
    }


def _sizes(one: Operation, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns sizes of inputs and outputs, which the analyzer compares over the ranks.

    They are flat, because operations of the core are recorded so.
    """
    if one.shape is None:
        return [], []
    count = math.prod(one.shape)
    shape = [count]
    if one.name in {"all_gather", "gather"}:
        return [shape], [[count * ranks]]
    if one.name == "all_gather_into_tensor":
        return [[count // ranks]], [shape]
    if one.name in {"scatter", "reduce_scatter", "reduce_scatter_tensor"}:
        return [[count * ranks]], [shape]
    return [shape], [shape]
