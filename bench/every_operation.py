"""How long does each collective and a message take, by backend, size and number of ranks?

Calls go through the public functions. Before every call the ranks leave a barrier together; each rank times
the call with its own clock, and the slowest rank counts. Peers alternate in batches of a few calls, so that
noise of the machine meets all of them alike.
``sendrecv`` is half of a ping-pong between neighbours, all pairs at once; the root is rank 0.

"""

from __future__ import annotations

import argparse

from collectives.bench.comparison import command as comparison
from collectives.bench.comparison.command import READING
from collectives.bench.comparison.operations import OPERATIONS
from collectives.bench.core.arguments import parse_names

__doc__ += READING


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--ops",
        type=parse_names,
        default=tuple(OPERATIONS),
        metavar="NAME,...",
        help=f"operations of {', '.join(OPERATIONS)} (default: all)",
    )
    comparison.add_arguments(parser, sizes="1K,64K,1M,16M,64M", budget_s=90.0)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where a result is wrong, or a goal missed.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    return comparison.run(arguments, "collectives", arguments.ops)
