"""What the command lines of the programs share: arguments, their converters, progress, errors, the end."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import math
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from collectives.bench.core.namespaces import NamespacesUnavailableError
from collectives.bench.core.page import write_page
from collectives.bench.core.records import BaseReport, header_lines, parse_sizes, report_lines, write_json
from collectives.cli import CommandError
from collectives.cli.output_files import output_file
from collectives.ranks.processes import RankFailedError

_R = TypeVar("_R")
_T = TypeVar("_T")

LOGGED_EVERY_S = 10.0
"""Least time between two lines of progress where stderr is no terminal."""

SHOWN_EVERY_S = 1.0
"""How often :func:`telling_how_long` tells it."""

_logged_at_s = time.monotonic()  # as if a line had come at the start: quick commands log none


def parse_counts(least: int) -> Callable[[str], tuple[int, ...]]:
    """Returns a converter of command-line arguments to whole numbers, by commas, of ``least`` or more."""

    def numbers(text: str) -> tuple[int, ...]:
        values = tuple(map(int, text.split(",")))
        if min(values) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, but is {min(values)}")
        return values

    numbers.__name__ = "int"  # argparse names it in messages
    return numbers


def at_least(least: int) -> Callable[[str], int]:
    """Returns a converter of command-line arguments to one such number."""
    counts = parse_counts(least)

    def number(text: str) -> int:
        return counts(str(int(text)))[0]

    number.__name__ = "int"
    return number


def positive(text: str) -> float:
    """Returns the number of a command-line argument, which must be finite and more than 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and more than 0, but is {value:g}")
    return value


positive.__name__ = "float"  # argparse names it in messages


def parse_names(text: str) -> tuple[str, ...]:
    """Returns the names of a command-line argument, separated by commas."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def parse_sizes_argument(text: str) -> tuple[int, ...]:
    """Returns the sizes of a command-line argument, as :func:`.parse_sizes` reads them."""
    try:
        return tuple(parse_sizes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def option(default: Any, /, *flags: str, **words: Any) -> Any:
    """Returns a field of a program's options that its command line has, too.

    Args:
        default: of the field, and of the command line unless the words name another, or a function for it.
        flags: on the command line.
        words: further arguments of ``add_argument``.
    """
    return dataclasses.field(default=default, metadata={"flags": flags, "default": default, **words})


def add_options(
    parser: argparse.ArgumentParser, kind: type[Any], without: Sequence[str] = (), **defaults: str
) -> None:
    """Adds the fields of a dataclass that are made by :func:`option`; their help is what its docstring says.

    Args:
        parser: the program's.
        kind: the dataclass.
        without: names of fields that are left out.
        defaults: what the help says that some are by default, in words.
    """
    said = _attributes_of(kind)
    for field in dataclasses.fields(kind):
        if field.metadata and field.name not in without:
            words = dict(field.metadata)
            if callable(words["default"]):
                words["default"] = words["default"]()
            default = defaults.get(field.name) or words["default"]
            shown = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else default
            about = said[field.name].rstrip(".")
            about += f" (default: {shown})" if shown and shown is not True else ""
            flags = words.pop("flags")
            parser.add_argument(*flags, dest=field.name, help=about.replace("%", "%%"), **words)


def _attributes_of(kind: type[Any]) -> dict[str, str]:
    """Returns what the docstrings of a class and its bases say of each attribute, in a line."""
    found = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^    (\w+): (.+(?:\n        .+)*)", section, re.MULTILINE):
            found[name] = " ".join(text.replace("``", "").split())
    return found


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json`` and ``--html``, which :func:`write_files` writes."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report to FILE")
    add_page(parser)


def add_page(parser: argparse.ArgumentParser) -> None:
    """Adds ``--html``, which :func:`write_html` writes."""
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


def options_from(kind: type[_T], arguments: argparse.Namespace) -> _T:
    """Returns a program's options from its arguments.

    Raises:
        CommandError: they do not fit together.
    """
    names = {field.name for field in dataclasses.fields(cast("Any", kind))}
    with failing_as_command(ValueError):
        return kind(**{name: value for name, value in vars(arguments).items() if name in names})


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


Progress = Callable[[str], object]
"""What is told with a short line from time to time how far a measurement is."""


def run_measurement(
    kind: type[_T],
    measure: Callable[[_T, Progress], BaseReport[_R]],
    right: Callable[[_R], bool],
    arguments: argparse.Namespace,
) -> int:
    """Runs a program as its command line asks, prints its report, and writes the files that are named.

    Args:
        kind: class of its options.
        measure: runs the measurement and returns its report.
        right: whether the results of a record are.
        arguments: those of :func:`add_options` and :func:`add_files`.

    Returns:
        The command's status: 1 where a record is wrong, or where there is none.

    Raises:
        CommandError: the arguments do not fit together, memory is short, there can be no network namespaces
            here, or a rank failed.
    """
    options = options_from(kind, arguments)
    with failing_as_command(RankFailedError, MemoryError, NamespacesUnavailableError):
        report = measure(options, show_progress)
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


def silent(line: str) -> None:
    """Tells nobody what is under way."""


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
