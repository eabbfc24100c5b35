"""The command line of a comparison: its options, and what it prints, writes and draws."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from collectives.bench.comparison.goals import goal_lines, parse_goal
from collectives.bench.comparison.measurement import measure
from collectives.bench.comparison.options import Options
from collectives.bench.comparison.records import Record, brief_line, plot
from collectives.bench.core.arguments import (
    add_files,
    add_options,
    failing_as_command,
    options_from,
    show_progress,
    write_files,
)
from collectives.bench.core.namespaces import NamespacesUnavailableError
from collectives.bench.core.text import header_lines, parse_sizes, report_lines, skipped_lines
from collectives.cli import CommandError
from collectives.cli.output_files import output_file
from collectives.ranks.processes import RankFailedError

READING = """\
- *cold* calls rotate through buffers that were all rewritten since they were last used, as gradients are;
- *hot* calls reuse one buffer, as many benchmarks do, which flatters small and middle sizes;
- *loop* is the time of one call in a row of many without a barrier, for small sizes.

Columns and bandwidths are those of nccl-tests: size is that of the whole array, algbw = size / time,
busbw = algbw * 2(n-1)/n of an all-reduce, algbw * (n-1)/n where the array consists of a part for each
rank, in 1e9 bytes a second. ``#wrong`` counts elements over all calls and ranks that differ from a formula of
rank. ``--limit`` measures ``tensor.add_(0)`` on all ranks at once. The limit is not a peer; its column shows
the share of memory bandwidth that the first peer reaches: the limit's time over the peer's.

Goals, each ``--goal``:
PEER[.KIND] <= PEER[.KIND] [/ FACTOR | * FACTOR] [+ X us] [@ SIZES] [; ops NAME,...] [; ranks N,...]
for example ``host <= mpi4py/1.2 @ 16K:64K; ranks 2`` or ``host.loop <= mpi4py.loop + 0.8 us``."""
"""How to read the tables; part of the programs' descriptions."""

QUICK_SIZES = "1K,1M,64M"
QUICK_BUDGET_S = 6.0


def add_arguments(parser: argparse.ArgumentParser, sizes: str, budget_s: float) -> None:
    """Adds the options that the programs share to a parser.

    Args:
        parser: the program's.
        sizes: its default sizes.
        budget_s: its default budget.
    """
    parser.set_defaults(default_sizes=sizes, default_budget=budget_s, in_place=True)
    budget = f"{budget_s:g}, quick: {QUICK_BUDGET_S:g}"
    add_options(parser, Options, sizes=f"{sizes}, quick: {QUICK_SIZES}", budget_s=budget)
    add_files(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a short look: few sizes, a small budget, a line for each as soon as it is there, no tables",
    )
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="draw time and bus bandwidth over size into FILE (PNG)",
    )


def run(arguments: argparse.Namespace, program: str, operations: Sequence[str]) -> int:
    """Runs a program as the command line asks; returns 1 where a result is wrong or a goal missed.

    Args:
        arguments: of :func:`add_arguments`; ``in_place`` may be there too.
        program: name of the program.
        operations: names of what is measured.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib; install it with: python -m pip install matplotlib")
    if arguments.plot is not None and set(operations) == {"barrier"}:
        raise CommandError("--plot draws over sizes, but a barrier has none")
    quick: bool = arguments.quick
    arguments.operations, arguments.goals = tuple(operations), tuple(arguments.goals)
    arguments.budget_s = arguments.budget_s or (QUICK_BUDGET_S if quick else arguments.default_budget)
    if arguments.sizes is None:
        arguments.sizes = tuple(parse_sizes(QUICK_SIZES if quick else arguments.default_sizes))
    options = options_from(Options, arguments)
    with failing_as_command(RankFailedError, NamespacesUnavailableError):
        report = measure(options, show_progress, _show_point if quick else None, program)
    header = header_lines(report)
    print("\n".join([*header, *(skipped_lines(report.skipped) if quick else report_lines(report))]))
    results, goals_met = goal_lines([parse_goal(goal) for goal in options.goals], report.records)
    if results:
        print("\n".join(["", *results]))
    write_files(report, arguments)
    if arguments.plot is not None and any(record.size_bytes for record in report.records):
        plot(report, arguments.plot)
    is_right = report.records and not any(record.wrong_elements for record in report.records)
    return 0 if is_right and goals_met else 1


def _show_point(records: Sequence[Record]) -> None:
    show_progress("")
    print(brief_line(records), flush=True)
