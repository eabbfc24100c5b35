"""How long does an all-reduce take, by backend, size and number of ranks?

Calls go through the public function ``collectives.all_reduce``. Before every call the ranks leave a barrier
together; each rank times the call with its own clock, and the slowest rank counts. Peers alternate in batches
of a few calls, so that noise of the machine meets all of them alike.

"""

from __future__ import annotations

import argparse

from collectives.bench.comparison import command as comparison
from collectives.bench.comparison.command import READING
from collectives.bench.comparison.measurement import measure
from collectives.bench.comparison.options import Options

__all__ = ["Options", "add_arguments", "measure", "run"]

__doc__ += READING


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser.

    Args:
        parser: of the command ``collectives bench allreduce``.
    """
    comparison.add_arguments(parser, sizes="8:64M", budget_s=40.0)
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--in-place",
        dest="in_place",
        action="store_true",
        default=True,
        help="reduce the tensor itself (default)",
    )
    place.add_argument(
        "--out-of-place",
        dest="in_place",
        action="store_false",
        help="copy the tensor and reduce the copy; the copy is part of the time",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; blocks until it has printed its tables.

    Args:
        arguments: as :func:`add_arguments` describes them.

    Returns:
        The exit status: 1 where a result is wrong or a goal missed, else 0.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    return comparison.run(arguments, "allreduce", ("all_reduce",))
