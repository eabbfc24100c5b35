"""Files of the flight record, read and put on one time axis.

Ranks of one machine share its monotonic clock, so that their times compare to the nanosecond. Machines are
put together by their wall clocks first. Those may be milliseconds apart; so what is left is taken from the
operations that no rank leaves before all have come, which end everywhere at nearly the same time.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from collectives.cli import CommandError
from collectives.core.recording.dump import FORMAT

__all__ = ["FlightFile", "Group", "Operation", "clock_offsets", "read_files", "write_for_torch"]

_END_TOGETHER = ("all_", "barrier", "reduce_scatter")


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
    """

    number: int
    name: str
    detail: str
    shape: tuple[int, ...] | None
    dtype: str
    nbytes: int
    timeout: float
    state: str
    began: int
    ended: int | None
    error: str
    site: str

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
    """

    name: str
    description: str
    backend: str
    rank: int
    global_ranks: tuple[int, ...]
    operations: tuple[Operation, ...]


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

    rank: int
    process: int
    host: str
    boot: str
    reason: str
    monotonic: int
    time: int
    groups: tuple[Group, ...]


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
        return FlightFile(
            **_fields(values, rank=int, process=int, host=str, boot=str, reason=str),
            monotonic=int(values["monotonic_ns"]),
            time=int(values["time_ns"]),
            groups=tuple(_group(group) for group in values["groups"]),
        )
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CommandError(
            f"{path} is no flight record: {type(error).__name__}: {error}; files are written by "
            "dump_flight_record, and as COLLECTIVES_FLIGHT_RECORD_FILE says"
        ) from None


def _fields(values: Any, **kinds: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns entries of a file by name, each of its kind."""
    return {name: kind(values[name]) for name, kind in kinds.items()}


def _group(values: Any) -> Group:
    group = Group(
        **_fields(values, name=str, description=str, backend=str, rank=int),
        global_ranks=tuple(int(rank) for rank in values["global_ranks"]),
        operations=tuple(_operation(one) for one in values["operations"]),
    )
    if not 0 <= group.rank < len(group.global_ranks):
        raise ValueError(f"rank {group.rank} in a group of {len(group.global_ranks)}")
    return group


def _operation(values: Any) -> Operation:
    shape, ended = values["shape"], values["ended_ns"]
    return Operation(
        **_fields(values, number=int, name=str, detail=str, dtype=str, state=str, error=str, site=str),
        shape=None if shape is None else tuple(int(extent) for extent in shape),
        nbytes=int(values["bytes"]),
        timeout=float(values["timeout_seconds"]),
        began=int(values["began_ns"]),
        ended=None if ended is None else int(ended),
    )


def clock_offsets(files: Sequence[FlightFile]) -> dict[str, int]:
    """Returns what to add to the monotonic clock of each machine, by ``boot``, for one time axis.

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


def _ends(files: Sequence[FlightFile], boot: str, offset: int) -> dict[tuple[str, str, int], float]:
    """Returns when operations of all ranks ended on a machine."""
    found: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for file in files:
        if file.boot != boot:
            continue
        for group in file.groups:
            for one in group.operations:
                if one.name.startswith(_END_TOGETHER) and one.state == "done" and one.ended is not None:
                    found[group.name, one.name, one.number].append(one.ended + offset)
    return {key: median(times) for key, times in found.items()}


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
            numbers = [one.number for one in group.operations if not one.is_message]
            place = group.name, group.global_ranks
            first[place] = max(first.get(place, 0), min(numbers, default=0))
    return first


def _record(file: FlightFile, first: dict[_Place, int]) -> dict[str, Any]:
    chosen = [
        (group, one)
        for group in file.groups
        for one in group.operations
        if not one.is_message and one.number >= first[group.name, group.global_ranks]
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
