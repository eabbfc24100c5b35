"""What the command lines of the programs share: arguments, their converters, progress, errors, the end."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from collectives.bench.core.page import write_page
from collectives.bench.core.records import BaseReport, write_json
from collectives.bench.core.text import header_lines, parse_sizes, report_lines
from collectives.cli import CommandError
from collectives.cli.mpi_job import usual_ranks
from collectives.cli.output_files import output_file

__all__ = [
    "add_files",
    "add_iterations",
    "add_machines",
    "add_page",
    "add_rank_options",
    "add_ranks",
    "add_turns",
    "at_least",
    "check_plot",
    "check_turns",
    "conclude",
    "failing_as_command",
    "options_from",
    "parse_counts",
    "parse_names",
    "parse_sizes_argument",
    "show_progress",
    "telling_how_long",
    "write_files",
    "write_html",
]

_R = TypeVar("_R")
_T = TypeVar("_T")

LOGGED_EVERY_S = 10.0
"""Least time between two lines of progress where stderr is no terminal."""

SHOWN_EVERY_S = 1.0
"""How often :func:`telling_how_long` tells it."""

_logged_at_s = time.monotonic()  # as if a line had come at the start: quick commands log none


# ---- converters ----------------------------------------------------------------------------------------


def at_least(least: int) -> Callable[[str], int]:
    """Returns a converter of command-line arguments to whole numbers that are not smaller than ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, but is {value}")
        return value

    number.__name__ = "int"  # argparse names it in messages
    return number


def parse_counts(least: int) -> Callable[[str], tuple[int, ...]]:
    """Returns a converter of command-line arguments to numbers like those of :func:`at_least`, by commas."""
    number = at_least(least)

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(number(part) for part in text.split(","))

    numbers.__name__ = "int"
    return numbers


def parse_names(text: str) -> tuple[str, ...]:
    """Returns the names of a command-line argument, separated by commas."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def parse_sizes_argument(text: str) -> tuple[int, ...]:
    """Returns the sizes of a command-line argument, as :func:`~collectives.bench.core.text.parse_sizes`."""
    try:
        return tuple(parse_sizes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---- arguments -----------------------------------------------------------------------------------------


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds ``--nproc`` for one number of ranks."""
    parser.add_argument(
        "--nproc",
        type=at_least(1),
        default=usual_ranks(),
        metavar="N",
        help="number of ranks (default: 2, or what mpirun started)",
    )


def add_iterations(parser: argparse.ArgumentParser, what: str, warmup: int | None, otherwise: str) -> None:
    """Adds ``--iters`` and ``--warmup``.

    Args:
        parser: the program's.
        what: what is timed, in words.
        warmup: how many of them come before; ``None`` where the budget decides.
        otherwise: that number in words.
    """
    parser.add_argument(
        "--iters",
        type=at_least(1),
        metavar="N",
        help=f"{what} (default: 5 to 200, as the budget allows)",
    )
    parser.add_argument(
        "--warmup",
        type=at_least(2),
        default=warmup,
        metavar="N",
        help=f"how many come before, not timed (default: {otherwise})",
    )


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--import`` and ``--bind``, which hold for all ranks."""
    parser.add_argument(
        "--import",
        dest="imports",
        type=parse_names,
        default=(),
        metavar="MODULE,...",
        help="modules that register further backends",
    )
    parser.add_argument(
        "--bind", action="store_true", help="keep each rank, with all its threads, on a core of its own"
    )


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Adds ``--machines`` and ``--link``."""
    parser.add_argument(
        "--machines",
        type=at_least(1),
        default=1,
        metavar="N",
        help="network namespaces that play machines, with equal shares of the ranks; needs the rights of an "
        "administrator (default: none)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="what each of these machines can send, in the units of tc, such as 1gbit (default: no limit)",
    )


def add_turns(parser: argparse.ArgumentParser, what: str, *, rounds: int, seconds: float) -> None:
    """Adds ``--rounds`` and ``--seconds``.

    Args:
        parser: the program's.
        what: what takes turns, in a word.
        rounds: turns of each, where the user says nothing.
        seconds: least duration of a turn, likewise.
    """
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=rounds,
        metavar="N",
        help=f"turns of each {what} (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        metavar="S",
        help="least time of a turn (default: %(default)s)",
    )


def check_turns(rounds: int, seconds: float) -> None:
    """Checks what :func:`add_turns` adds.

    Args:
        rounds: turns of each.
        seconds: least duration of a turn.

    Raises:
        ValueError: a number is too small, or a turn takes an hour or more.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, but is {rounds}")
    if not 0 < seconds < 3600:
        raise ValueError(f"seconds must be more than 0 and less than 3600, but is {seconds}")


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json`` and ``--html``, which :func:`write_files` writes."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report to FILE")
    add_page(parser)


def add_page(parser: argparse.ArgumentParser) -> None:
    """Adds ``--html``, which :func:`write_files` and :func:`write_html` write."""
    parser.add_argument(
        "--html",
        type=_page_path,
        metavar="FILE",
        help="write the report as a page with zoomable charts, which a browser shows without a network",
    )


def _page_path(text: str) -> Path:
    """Converts the argument of ``--html``, before anything is measured."""
    if importlib.util.find_spec("plotly") is None:
        raise argparse.ArgumentTypeError("needs Plotly; install it with: python -m pip install plotly")
    return output_file(text)


def options_from(kind: type[_T], arguments: argparse.Namespace, **renamed: str) -> _T:
    """Returns a program's options from its arguments.

    Args:
        kind: a dataclass.
        arguments: the arguments.
        renamed: names of those that have another name than the field.

    Raises:
        CommandError: they do not fit together.
    """
    names = (field.name for field in dataclasses.fields(cast("Any", kind)))
    with failing_as_command(ValueError):
        return kind(**{name: getattr(arguments, renamed.get(name, name)) for name in names})


# ---- running -------------------------------------------------------------------------------------------


def check_plot(path: Path | None) -> None:
    """Checks, before anything is measured, that a plot can be drawn where one is asked for.

    Raises:
        CommandError: matplotlib is missing.
    """
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib; install it with: python -m pip install matplotlib")


@contextmanager
def failing_as_command(*kinds: type[Exception]) -> Iterator[None]:
    """Context that gives errors of these kinds to the user as a command's, in one line, without a traceback.

    Wipes the line of :func:`show_progress` when it ends.
    """
    try:
        yield
    except kinds as error:
        raise CommandError(str(error)) from error
    finally:
        show_progress("")


def conclude(report: BaseReport[_R], right: Callable[[_R], bool], arguments: argparse.Namespace) -> int:
    """Prints a report, and writes the files that the arguments name.

    Args:
        report: what the program found out.
        right: whether the results of a record are.
        arguments: those of :func:`add_files`.

    Returns:
        The command's status: 1 where a record is wrong, or where there is none.
    """
    print("\n".join([*header_lines(report), *report_lines(report)]))
    write_files(report, arguments)
    return 0 if report.records and all(map(right, report.records)) else 1


def write_files(report: BaseReport[Any], arguments: argparse.Namespace) -> None:
    """Writes a report to the files of :func:`add_files`."""
    if arguments.json is not None:
        write_json(arguments.json, report.as_json())
    write_html(report, arguments)


def write_html(report: BaseReport[Any], arguments: argparse.Namespace) -> None:
    """Writes a report to the page of :func:`add_page`."""
    if arguments.html is not None:
        write_page(arguments.html, report, shlex.join(["collectives", *sys.argv[1:]]))


def show_progress(line: str) -> None:
    """Tells on stderr what is under way; an empty line wipes what a terminal shows.

    A terminal shows the line in place of the last. Elsewhere, as in a job's log, it becomes a line of its
    own, but only every :data:`LOGGED_EVERY_S` seconds.

    Args:
        line: what is under way, in a few words.
    """
    global _logged_at_s  # a process has one stderr, whoever writes
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line and time.monotonic() - _logged_at_s >= LOGGED_EVERY_S:
        _logged_at_s = time.monotonic()
        print(f"# {line}", file=sys.stderr, flush=True)


@contextmanager
def telling_how_long(what: str) -> Iterator[None]:
    """Context that tells from time to time for how long something has been under way.

    Args:
        what: that is, in a few words.
    """
    done = threading.Event()
    begin = time.monotonic()

    def tell() -> None:
        while not done.wait(SHOWN_EVERY_S):
            show_progress(f"{what}: {time.monotonic() - begin:.0f} s")

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        show_progress("")
