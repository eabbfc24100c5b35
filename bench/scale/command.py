"""What do a world, a group and an operation need as machines and ranks grow in number?

For each world, ranks form it, use it (barrier, all-reduce, a message to the next machine), make groups of all
ranks and destroy them; at last the leader of the last machine dies, and all others are to name it. Labels
(``COLLECTIVES_HOST_MACHINE``) make machines out of one, or network namespaces do.

Times are the slowest rank's: of ``new_group`` and operations the median of the calls, otherwise the sum.
Ranks share the cores of this machine, so that times tell what all ranks together need. "Mean" and "most" are
of the ranks. The last column is the slowest-growing law that is within 5 % of the values, or the closest one
with its error: n ranks are m machines with r ranks each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from collectives.bench.core.arguments import (
    add_files,
    at_least,
    conclude,
    failing_as_command,
    options_from,
    parse_sizes_argument,
    show_progress,
)
from collectives.bench.core.charts import Chart, Curve
from collectives.bench.core.groups import LOCALHOST, TIMEOUT, parent_store
from collectives.bench.core.machine import describe_machine, memory_available_bytes
from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError
from collectives.bench.core.records import BaseReport, Skipped
from collectives.bench.core.text import Column, skipped_lines, table_lines
from collectives.bench.scale.figures import Figure, death_figures, figures, world_figures
from collectives.bench.scale.growth import Growth, World, growth_of
from collectives.bench.scale.rank import Plan, body
from collectives.ranks.processes import ForkedRanks, RankFailedError
from collectives.secret import provided

__all__ = ["Options", "ScaleRecord", "ScaleReport", "add_arguments", "measure", "run"]

_WORLDS = "2x2,4x2,8x2,2x8,4x4,4x8,8x8"
_SIZES = "8,64K,1M"
_GROUP_BYTES = 1 << 20
"""Shared memory that a rank has in a group that nothing ran on, at most."""
_STAGING_BYTES = 4 << 20
"""What it has besides in the world's group, on which longer collectives run."""
_RANK_BYTES = 24 << 20
"""Memory of its own that a rank needs besides what it shares since the fork."""

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        worlds: machines and ranks.
        groups: how many groups are made and destroyed, 1 or more.
        sizes: of all-reduces, in bytes.
        iters: calls of each operation, 1 or more.
        namespaces: whether machines are network namespaces, which need the rights of an administrator.

    Raises:
        ValueError: a number is too small, or there is no world.
    """

    worlds: tuple[World, ...]
    groups: int = 21
    sizes: tuple[int, ...] = (8, 64 << 10, 1 << 20)
    iters: int = 5
    namespaces: bool = False

    def __post_init__(self) -> None:
        if not self.worlds:
            raise ValueError("there is no world to measure")
        for name in ("groups", "iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """One world.

    Attributes:
        world: machines and ranks.
        figures: by their keys, of :func:`~collectives.bench.scale.figures.figures`.
        named: how many ranks named the one that died.
        right: whether all results were right.
    """

    world: World
    figures: dict[str, float]
    named: int
    right: bool

    @property
    def complete(self) -> bool:
        """Whether all results were right, and all ranks that were left named the one that died."""
        return self.right and self.named == self.world.size - 1


class ScaleReport(BaseReport[ScaleRecord]):
    """All that the program found out."""

    def record_as_json(self, record: ScaleRecord) -> dict[str, Any]:
        """Returns a record as plain values."""
        world = record.world
        return {
            "machines": world.machines,
            "ranks_of_a_machine": world.local,
            "ranks": world.size,
            **record.figures,
            "named": record.named,
            "right": record.right,
        }

    def as_json(self) -> dict[str, Any]:
        """Returns the report, and the law of each figure, as plain values."""
        laws = {one.key: self.growth(one.key) for one in self.figures()}
        return {
            **super().as_json(),
            "growth": {key: None if law is None else asdict(law) for key, law in laws.items()},
        }

    def figures(self) -> list[Figure]:
        """Returns the figures that every world has."""
        wanted = figures(self.options["sizes"], self.options["groups"])
        return [one for one in wanted if all(one.key in record.figures for record in self.records)]

    def growth(self, key: str) -> Growth | None:
        """Returns the law that a figure follows; ``None`` where there are too few worlds.

        Args:
            key: of the figure.
        """
        return growth_of(
            [record.world for record in self.records], [record.figures[key] for record in self.records]
        )

    def charts(self) -> Sequence[Chart]:
        """Returns the times over the number of ranks, for each unit."""
        return [
            Chart(title, "ranks", unit, [self._curve(one) for one in self.figures() if one.unit == unit])
            for title, unit in (("Worlds and groups", "s"), ("Operations", "us"), ("Memory", "MiB"))
        ]

    def _curve(self, figure: Figure) -> Curve:
        records = sorted(self.records, key=lambda record: record.world.size)
        values = [record.figures[figure.key] for record in records]
        return Curve(figure.name.strip(), [record.world.size for record in records], values, values, values)


def measure(options: Options, progress: Progress | None = None) -> ScaleReport:
    """Runs the measurement and returns its report.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: the kernel forbids network namespaces, or a program is missing.
    """
    say = progress or (lambda _: None)
    plain = {**asdict(options), "worlds": [str(world) for world in options.worlds]}
    report = ScaleReport("scale", describe_machine(), plain)
    with provided():
        for world in options.worlds:
            need = world.size * ((options.groups + 1) * _GROUP_BYTES + _STAGING_BYTES + _RANK_BYTES)
            if need > memory_available_bytes():
                reason = f"{options.groups} groups may need {need >> 20} MiB, which are not free; make fewer"
                report.skipped.append(Skipped(str(world), reason))
                continue
            report.records.append(_measured(world, options, say))
    return report


def _measured(world: World, options: Options, say: Progress) -> ScaleRecord:
    """Returns what a world needs."""
    with ExitStack() as stack:
        host: str = LOCALHOST
        namespaces: tuple[str, ...] = ()
        if options.namespaces:
            machines = stack.enter_context(Machines(world.machines))
            host, namespaces = machines.host, machines.namespaces_of(world.size)
        store = parent_store(host)
        stack.callback(store.close)
        say(f"{world}: starting {world.size} processes")
        plan = Plan(world, host, store.port, namespaces)
        ranks = stack.enter_context(ForkedRanks(world.size, body, (plan,)))
        steps = {}
        for name, command in _commands(options):
            say(f"{world}: {name}")
            steps[name] = ranks.ask(command)
        say(f"{world}: death of a leader")
        ranks.send(("await_death", ()))
        death, named = death_figures(world, ranks.collect(TIMEOUT.total_seconds()))
        right = all(step.right for of_ranks in steps.values() for step in of_ranks)
        return ScaleRecord(world, world_figures(world, steps, options.groups) | death, named, right)


def _commands(options: Options) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yields the steps of a world, each with its name in the report."""
    yield "idle", ("idle", ())
    yield "form", ("form", ())
    yield "barrier", ("barrier", (options.iters,))
    for size in options.sizes:
        yield f"all_reduce_{size}", ("all_reduce", (size, options.iters))
    yield "message", ("message", (options.iters,))
    yield "groups", ("groups", (options.groups,))
    yield "destroy", ("destroy", ())


def _report_lines(report: ScaleReport) -> Iterator[str]:
    """Yields the lines of the report's table: a figure in each, and a column for each world."""
    worlds = [(str(record.world), "", 10) for record in report.records]
    columns: list[Column] = [("a rank", "", -32), ("unit", "", -6), *worlds, ("  growth", "", -1)]
    rows = [
        (
            one.name,
            one.unit,
            *(format(record.figures[one.key], one.form) for record in report.records),
            f"  {report.growth(one.key) or '-'}",
        )
        for one in report.figures()
    ]
    yield from table_lines(columns, rows)
    for record in report.records:
        if not record.complete:
            told = f"{record.named} of {record.world.size - 1} ranks named the one that died"
            yield f"# {record.world}: {told}; results were {'right' if record.right else 'WRONG'}"
    yield from skipped_lines(report.skipped)


def _worlds(text: str) -> tuple[World, ...]:
    """Converts the argument of ``--worlds``."""
    worlds = []
    for part in text.split(","):
        machines, _, local = part.partition("x")
        if not (machines.isdecimal() and local.isdecimal()):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no world; write machines and the ranks of each as 4x8"
            )
        try:
            worlds.append(World(int(machines), int(local)))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return tuple(worlds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--worlds",
        type=_worlds,
        default=_WORLDS,
        metavar="MxR,...",
        help="machines, and ranks of each (default: %(default)s)",
    )
    parser.add_argument(
        "--groups",
        type=at_least(1),
        default=21,
        metavar="N",
        help="groups of all ranks that are made and destroyed (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        type=parse_sizes_argument,
        default=_SIZES,
        metavar="SIZES",
        help="sizes of all-reduces (default: %(default)s)",
    )
    parser.add_argument(
        "--iters",
        type=at_least(1),
        default=5,
        metavar="N",
        help="calls of each operation (default: %(default)s)",
    )
    parser.add_argument(
        "--namespaces",
        action="store_true",
        help="network namespaces are the machines, which needs the rights of an administrator",
    )
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where a result was wrong or a death not named.

    Raises:
        CommandError: the arguments do not fit together, a rank failed, or there are no namespaces.
    """
    options = options_from(Options, arguments)
    with failing_as_command(RankFailedError, NamespacesUnavailableError):
        report = measure(options, show_progress)
    return conclude(report, _report_lines(report), lambda record: record.complete, arguments)
