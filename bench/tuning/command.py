"""Measures which thresholds of the host backend are best on this machine, and keeps those that are better.

A threshold decides how an operation is carried out, such as up to which length a message goes in one piece;
it never changes a bit of a result. Groups that differ in one threshold are timed in turn, beside two groups
that do not differ at all: only what saves clearly more time than those differ by counts as better. At the end
all new thresholds together are timed against the defaults, and stored if they are better and make nothing
slower. Groups of this machine load them from then on.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from collectives.backends.host import tuning_file
from collectives.bench.core.arguments import add_files, parse_counts, show_progress, write_files
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.sizes import format_bytes
from collectives.bench.tuning.report import Report
from collectives.bench.tuning.search import Outcome, TooNoisyError, search
from collectives.bench.tuning.timing import TimedGroups
from collectives.cli import CommandError
from collectives.ranks.processes import RankFailedError

__all__ = ["add_arguments", "entries", "run", "table"]

STARTING_S = 8.0
"""What starting the ranks of one number may take of the budget."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--nproc",
        type=_counts,
        default=(2, 4),
        metavar="N,...",
        help="numbers of ranks to measure, 2 or more (default: 2,4)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=100.0,
        metavar="SECONDS",
        help="time that all should take (default: %(default)g)",
    )
    parser.add_argument("--dry-run", action="store_true", help="measure and print, but store nothing")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help=f"where to store them (default: where groups look, {tuning_file.path() or 'which is nowhere'})",
    )
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 0 also where the defaults are best.

    Raises:
        CommandError: the machine is too noisy to decide, a rank failed, or the file cannot be written.
    """
    file: Path | None = arguments.file or tuning_file.path()
    if file is None and not arguments.dry_run:
        raise CommandError(
            f"{tuning_file.VARIABLE} is empty, so that groups look nowhere; unset it, or give --file"
        )
    share_s = max(1.0, arguments.budget / len(arguments.nproc) - STARTING_S)
    options = {"nproc": [*arguments.nproc], "budget": arguments.budget}
    report = Report("collectives tune", describe_machine(), options)
    outcomes = report.records
    for ranks in arguments.nproc:
        try:
            with TimedGroups(ranks) as groups:
                outcome = search(groups, ranks, tuning_file.defaults(ranks), share_s, progress=show_progress)
        except TooNoisyError as error:
            raise CommandError(
                f"{ranks} ranks: {error}; nothing is stored. Try again when nothing else runs on this machine"
            ) from None
        except RankFailedError as error:
            raise CommandError(str(error)) from error
        finally:
            show_progress("")
        outcomes.append(outcome)
        print("\n".join(table(outcome)), end="\n\n", flush=True)
    write_files(report, arguments)
    found = entries(outcomes)
    if not any(outcome.after for outcome in outcomes):
        print("The defaults are best here; nothing is stored.")
    elif arguments.dry_run or file is None:
        print("Nothing is stored, because this is a dry run.")
    else:
        _store(found, file)
    return 0


def _store(found: Mapping[int, Mapping[str, int]], file: Path) -> None:
    try:
        kept = tuning_file.stored(file)
    except FileNotFoundError:
        kept = {}
    except ValueError as error:
        print(f"{file} is replaced, because it cannot be used: {error}")
        kept = {}
    try:
        print(f"Stored in {tuning_file.save({**kept, **found}, file)}.")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error}") from error


def entries(outcomes: list[Outcome]) -> dict[int, dict[str, int]]:
    """Returns what is stored for each number of ranks: only thresholds that measured better.

    Groups without an entry take that of the next smaller size. An empty entry keeps those groups on their
    defaults for which nothing was better, and groups of 3, whose defaults are of another kind than a pair's.
    """
    found = {outcome.ranks: dict(outcome.after) for outcome in outcomes}
    if 2 in found:
        found.setdefault(3, {})
    return found


def table(outcome: Outcome) -> list[str]:
    """Returns the lines that show an outcome."""
    lines = [f"{outcome.ranks} ranks: {outcome.conclusion} (noise {outcome.noise:.1%})"]
    for name, noise, value, gain in outcome.steps:
        lines.append(
            f"  {name}: {outcome.before[name]} -> {value}, alone {gain:.1%} faster (noise {noise:.1%})"
        )
    lines.append(f"  {'operation':16}{'size':>10}{'before us':>12}{'after us':>12}{'ratio':>8}")
    for probe, before, after in zip(outcome.probes, outcome.before_us, outcome.after_us, strict=True):
        size = format_bytes(probe.size_bytes)
        lines.append(f"  {probe.operation:16}{size:>10}{before:12.2f}{after:12.2f}{after / before:8.2f}")
    return lines


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(parse_counts(2)(text))))
