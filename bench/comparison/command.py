"""The command line of a comparison: its options, and what it prints, writes and draws."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from collectives.backends.algorithms import ALGORITHMS
from collectives.backends.nccl import providers
from collectives.bench.comparison import operations
from collectives.bench.comparison.goals import goal_lines, parse_goal
from collectives.bench.comparison.measurement import DTYPES, Options, measure
from collectives.bench.comparison.records import Record, brief_line, plot, report_lines
from collectives.bench.core.arguments import (
    add_files,
    add_iterations,
    add_machines,
    add_rank_options,
    check_plot,
    failing_as_command,
    parse_counts,
    parse_names,
    parse_sizes_argument,
    show_progress,
    write_files,
)
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.namespaces import NamespacesUnavailableError
from collectives.bench.core.text import header_lines, parse_sizes, skipped_lines
from collectives.cli import CommandError
from collectives.cli.mpi_job import usual_ranks
from collectives.cli.output_files import output_file
from collectives.ranks.processes import RankFailedError

__all__ = ["READING", "add_arguments", "run"]

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
    parser.add_argument(
        "--backends",
        type=parse_names,
        metavar="NAME,...",
        help="backends, BACKEND:ALGORITHM for an all-reduce made of a backend's messages or broadcasts "
        f"({', '.join(ALGORITHMS)}), torch:NAME for torch's functions on its backend NAME, and mpi4py for "
        "plain mpi4py under mpirun (default: all backends usable here, and mpi4py or torch:nccl)",
    )
    parser.add_argument(
        "--device",
        choices=tuple(DEVICES),
        default="cpu",
        help="where the tensors are; on cuda a call is over when the device is, and ranks share GPUs where "
        "there are fewer (default: %(default)s)",
    )
    parser.add_argument(
        "--mpi",
        dest="mpis",
        type=_parse_mpis,
        default=(),
        metavar="NAME=FOLDER,...",
        help="further installations of MPI, folders with bin and lib, each a peer mpi4py:NAME",
    )
    parser.add_argument(
        "--provider",
        choices=providers.PROVIDERS,
        help=f"package that loads NCCL for the nccl backend (default: {providers.PROVIDER_VARIABLE}, or else "
        "the first that works)",
    )
    parser.add_argument(
        "--nproc",
        type=parse_counts(1),
        default=(usual_ranks(),),
        metavar="N,...",
        help="numbers of ranks (default: 2, or what mpirun started)",
    )
    parser.add_argument(
        "--sizes",
        type=parse_sizes_argument,
        metavar="SIZES",
        help="bytes: SIZE,..., FIRST:LAST[:FACTOR] or FIRST:LAST:+STEP; K, M, G "
        f"(default: {sizes}, quick: {QUICK_SIZES})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a short look: few sizes, a small budget, a line for each as soon as it is there, no tables",
    )
    parser.set_defaults(default_sizes=sizes, default_budget=budget_s)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", metavar="TYPE", help="data type (default: %(default)s)"
    )
    parser.add_argument(
        "--op", choices=operations.REDUCTIONS, default="sum", help="reduction (default: %(default)s)"
    )
    add_iterations(parser, "calls of each peer at each size", None, "2 to 5, as the budget allows")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"time that each run should take (default: {budget_s:g}, quick: {QUICK_BUDGET_S:g})",
    )
    parser.add_argument(
        "--limit",
        action="store_true",
        help="measure the memory limit too: tensor.add_(0) on all ranks at the same time",
    )
    add_rank_options(parser)
    add_machines(parser)
    parser.add_argument(
        "--goal",
        dest="goals",
        action="append",
        default=[],
        metavar="GOAL",
        help="what a peer's time must not exceed; the summary tells which goals are met (see above)",
    )
    add_files(parser)
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="draw time and bus bandwidth over size into FILE (PNG)",
    )


def _parse_mpis(text: str) -> tuple[tuple[str, str], ...]:
    """Converts the argument of ``--mpi``."""
    pairs = tuple((name, folder) for name, _, folder in (part.partition("=") for part in parse_names(text)))
    if not all(name and folder for name, folder in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER,...")
    return pairs


def run(arguments: argparse.Namespace, program: str, operations: Sequence[str]) -> int:
    """Runs a program as the command line asks; returns 1 where a result is wrong or a goal missed.

    Args:
        arguments: of :func:`add_arguments`; ``in_place`` may be there too.
        program: name of the program.
        operations: names of what is measured.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    check_plot(arguments.plot)
    if arguments.plot is not None and set(operations) == {"barrier"}:
        raise CommandError("--plot draws over sizes, but a barrier has none")
    quick: bool = arguments.quick
    budget = arguments.budget or (QUICK_BUDGET_S if quick else arguments.default_budget)
    with failing_as_command(ValueError):
        options = Options(
            backends=arguments.backends,
            ranks=arguments.nproc,
            sizes=arguments.sizes or tuple(parse_sizes(QUICK_SIZES if quick else arguments.default_sizes)),
            operations=tuple(operations),
            dtype=arguments.dtype,
            redop=arguments.op,
            in_place=getattr(arguments, "in_place", True),
            calls=arguments.iters,
            warmup=arguments.warmup,
            budget_s=budget,
            limit=arguments.limit,
            imports=arguments.imports,
            bind=arguments.bind,
            goals=tuple(arguments.goals),
            machines=arguments.machines,
            link=arguments.link,
            device=arguments.device,
            provider=arguments.provider,
            mpis=arguments.mpis,
        )
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
