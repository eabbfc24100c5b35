"""Flight records in the form that torch's analyzer reads (``torch.distributed.flight_recorder.fr_trace``).

It knows the backends of torch alone, so that ``nccl`` keeps its name there and all others are ``gloo``.
Messages are left out: it pairs them only within coalesced groups of NCCL.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.cli.flight_files import FlightFile, Group, Operation

__all__ = ["write_for_torch"]

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
