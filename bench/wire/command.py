"""How much processor time do bytes between two machines take, beside what the kernel takes to move them?

Two ranks, which count as two machines, move the same bytes over TCP in turns: by system calls alone, in each
of :data:`~collectives.bench.wire.ways.WAYS`, and by operations of the ``host`` backend. Processor time is
that of both ranks, with all their threads; the kernel's share of a connection over the loopback interface is
in it. An all-reduce adds besides, so that its figure says how much more that is.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from collectives.bench.core.arguments import (
    add_files,
    add_turns,
    check_turns,
    conclude,
    failing_as_command,
    options_from,
    parse_sizes_argument,
    show_progress,
)
from collectives.bench.core.charts import Chart, Curve
from collectives.bench.core.groups import parent_store
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.records import BaseReport
from collectives.bench.core.sizes import format_bytes
from collectives.bench.core.text import Column, table_lines
from collectives.bench.wire.rank import OURS, run_rank
from collectives.bench.wire.ways import WAYS
from collectives.ranks.processes import RankFailedError, SpawnedRanks
from collectives.secret import provided

__all__ = ["Options", "WireRecord", "WireReport", "add_arguments", "measure", "run"]

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        sizes: bytes to move, each a multiple of 8.
        rounds: turns of each way, 1 or more.
        seconds: least duration of a turn.

    Raises:
        ValueError: a number is too small, or a size is no multiple of 8.
    """

    sizes: tuple[int, ...] = (64 << 20,)
    rounds: int = 5
    seconds: float = 0.3

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size < 8 or size % 8:
                raise ValueError(f"sizes must be multiples of 8 bytes, but one is {size}")
        check_turns(self.rounds, self.seconds)


@dataclass(frozen=True, slots=True)
class WireRecord:
    """One way to move bytes of one size.

    Attributes:
        size_bytes: how many.
        way: its name, of :data:`~collectives.bench.wire.ways.WAYS` or
            :data:`~collectives.bench.wire.rank.OURS`.
        cpu_ms_per_gb: milliseconds of processors that both ranks take for a gigabyte, by round.
        sender_share: which part of them the first rank takes.
        gb_per_s: gigabytes that cross in a second; median of the rounds.
        over_kernel: processor time as a multiple of what the best of the system calls takes.
        right: whether the bytes arrived.
    """

    size_bytes: int
    way: str
    cpu_ms_per_gb: tuple[float, ...]
    sender_share: float
    gb_per_s: float
    over_kernel: float
    right: bool

    @property
    def cpu(self) -> float:
        """Milliseconds of processors for a gigabyte; median of the rounds."""
        return statistics.median(self.cpu_ms_per_gb)


class WireReport(BaseReport[WireRecord]):
    """All that the program found out."""

    def record_as_json(self, record: WireRecord) -> dict[str, Any]:
        """Returns a record as plain values."""
        return {**asdict(record), "cpu_ms_per_gb_median": record.cpu}

    def charts(self) -> Sequence[Chart]:
        """Returns the processor time of all ways, for each size."""
        return [
            Chart(f"{format_bytes(size)} over TCP", "", "ms of processors for a GB", [self._curve(size)])
            for size in dict.fromkeys(record.size_bytes for record in self.records)
        ]

    def _curve(self, size: int) -> Curve:
        records = [record for record in self.records if record.size_bytes == size]
        return Curve(
            "both ranks",
            [record.way for record in records],
            [record.cpu for record in records],
            [min(record.cpu_ms_per_gb) for record in records],
            [max(record.cpu_ms_per_gb) for record in records],
        )


@dataclass
class _Turns:
    """What the turns of one way took; a turn is nanoseconds and those of processors, by rank, for a byte."""

    crossings: int
    times: int = 1
    right: bool = True
    wall: list[float] = field(default_factory=list)
    cpu: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, ranks: Sequence[tuple[int, int]], size: int) -> None:
        moved = self.times * self.crossings * size
        self.wall.append(max(wall for wall, _ in ranks) / moved)
        self.cpu.append(tuple(used / moved for _, used in ranks))


def measure(options: Options, progress: Progress | None = None) -> WireReport:
    """Runs the measurement and returns its report.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
    """
    say = progress or (lambda _: None)
    report = WireReport("wire", describe_machine(), asdict(options))
    for size in options.sizes:
        with provided(), closing(parent_store()) as store, SpawnedRanks(2, run_rank, (size,)) as ranks:
            _, port = ranks.ask(("port",))
            ranks.ask(("connect", port, store.port))
            turns = {
                name: _Turns(crossings) for name, crossings in {**dict.fromkeys(WAYS, 1), **OURS}.items()
            }
            for name, turn in turns.items():
                turn.right = all(ranks.ask(("check", name)))
                once = max(wall for wall, _ in ranks.ask(("move", name, 2))) / 2e9
                turn.times = max(1, math.ceil(options.seconds / once))
            for number in range(options.rounds):
                say(f"{format_bytes(size)}: round {number + 1} of {options.rounds}")
                for name, turn in turns.items():
                    turn.add(ranks.ask(("move", name, turn.times)), size)
        report.records += _records(size, turns)
    return report


def _records(size: int, turns: Mapping[str, _Turns]) -> Iterator[WireRecord]:
    medians = {name: statistics.median(map(sum, turn.cpu)) for name, turn in turns.items()}
    best = min(medians[name] for name in WAYS)
    for name, turn in turns.items():
        yield WireRecord(
            size,
            name,
            tuple(sum(ranks) * 1e3 for ranks in turn.cpu),
            sum(ranks[0] for ranks in turn.cpu) / sum(map(sum, turn.cpu)),
            1 / statistics.median(turn.wall),
            medians[name] / best,
            turn.right,
        )


_COLUMNS: Sequence[Column] = (
    ("size", "", -9),
    ("way", "", -18),
    ("processors", "ms/GB", 11),
    ("sender", "%", 7),
    ("crosses", "GB/s", 8),
    ("over best", "", 10),
    ("right", "", 6),
)


def _report_lines(report: WireReport) -> Iterator[str]:
    """Yields the lines of the report's table."""
    rows = (
        (
            format_bytes(record.size_bytes),
            record.way,
            f"{record.cpu:.0f}",
            f"{record.sender_share * 100:.0f}",
            f"{record.gb_per_s:.2f}",
            f"{record.over_kernel:.2f}",
            "yes" if record.right else "no",
        )
        for record in report.records
    )
    yield from table_lines(_COLUMNS, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--sizes",
        type=parse_sizes_argument,
        default=Options().sizes,
        metavar="SIZES",
        help="bytes to move, such as 1M,64M (default: 64M)",
    )
    add_turns(parser, "way", rounds=5, seconds=0.3)
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where bytes arrived wrong.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    options = options_from(Options, arguments)
    with failing_as_command(RankFailedError):
        report = measure(options, show_progress)
    return conclude(report, _report_lines(report), lambda record: record.right, arguments)
