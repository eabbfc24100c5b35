"""Checks the nccl backend on the GPUs of this machine, and reports row by row what holds.

Sections: preflight (driver, CUDA, one libnccl, both providers, topology), conformance (every function and
data type beside torch's own NCCL), streams (late producers, memory that is given out again, no waiting on the
host), failures (ranks that die, stop, do not come or leave), bandwidth (all-reduces beside torch's own NCCL),
training (beside torch's DistributedDataParallel), host-cost (of a call, with CUDA and NCCL stubbed) and tests
(those of the repository). Ends with status 1 where a row failed or was skipped. The files of --json and
--html are the report to send.
"""

from __future__ import annotations

import argparse
import os
import sys

from collectives.bench.acceptance.platform import load
from collectives.bench.acceptance.report import Report, Verdict
from collectives.bench.acceptance.sections import OF_SEVERAL_RANKS, SECTIONS, Plan, root
from collectives.bench.core.arguments import add_files, parse_counts, parse_names, write_files
from collectives.bench.core.devices import numbers_of_ranks
from collectives.bench.core.machine import describe_machine
from collectives.cli import CommandError

_CUDA = "collectives.bench.acceptance.platform"
_DOUBLE = "nccl_double.platform"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "--ranks",
        type=parse_counts(1),
        metavar="N,...",
        help="numbers of ranks; 1 is for training only (default: 1, 2, 3 and one for each GPU, of those that "
        "have a GPU for each rank; 1 and 2 that share it where there is one GPU)",
    )
    parser.add_argument(
        "--sections",
        type=parse_names,
        default=tuple(SECTIONS),
        metavar="NAME,...",
        help=f"only these, of {', '.join(SECTIONS)}",
    )
    parser.add_argument("--short", action="store_true", help="one data type and one provider stand for all")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run over the double of NCCL that the repository's tests have, without a GPU",
    )
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks, prints a row for each, and returns 0 where there were some and all passed, else 1.

    Raises:
        CommandError: there is nothing to check here, or no such section.
    """
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        raise CommandError(f"unknown sections {', '.join(unknown)}; known are {', '.join(SECTIONS)}")
    alone = [name for name in arguments.sections if name in OF_SEVERAL_RANKS]
    if alone and arguments.ranks and max(arguments.ranks) < 2:
        raise CommandError(
            f"one rank has nobody to talk to in {', '.join(alone)}; give 2 to --ranks, too, or training to "
            "--sections"
        )
    module = _DOUBLE if arguments.rehearse else _CUDA
    if arguments.rehearse:
        _find_double()
    platform = load(module)
    reason = platform.why_unavailable()
    if reason is not None:
        raise CommandError(f"accept: {reason}")
    platform.prepare()
    ranks = arguments.ranks or (1, *numbers_of_ranks(len(platform.gpus())))
    plan = Plan(module, platform, ranks, arguments.short)
    options = {"ranks": [*ranks], "sections": [*arguments.sections], "short": arguments.short}
    report = Report("collectives accept", {"on": platform.title, **describe_machine()}, options)
    print(f"# {report.program}: {platform.title}", flush=True)
    for name in arguments.sections:
        for row in SECTIONS[name](plan):
            report.records.append(row)
            print(row.line(), flush=True)
            write_files(report, arguments)  # what there is, should the machine go down
    print(f"# {report.summary()}")
    return int(not 0 < report.count(Verdict.PASSED) == len(report.records))


def _find_double() -> None:
    """Lets this process and the ranks import the double.

    Raises:
        CommandError: this is no checkout.
    """
    tests = root() / "tests"
    if not (tests / "nccl_double" / "platform.py").is_file():
        raise CommandError(
            "accept --rehearse needs the double of NCCL, which is part of the repository and not of the "
            "installed package; run it from a checkout that was installed with pip install -e '.[dev]'"
        )
    support = tests / "support"
    folders = [str(path) for path in (tests, support, support / "ranks", support / "interpreters")]
    sys.path[:0] = folders  # spawned ranks get this process's path, started ones the variable
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
