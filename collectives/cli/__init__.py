"""The command ``collectives``: accept, demo, bench, backends, doctor, ps, trace.

Programs are modules with ``add_arguments(parser)`` and ``run(arguments) -> int``. They are reached by name,
and only the one that is asked for is loaded, so that nothing here depends on them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from collectives.cli import mpi_job
from collectives.secret import provided

PROGRAMS = {
    "accept": (
        "collectives.bench.acceptance.command",
        "check the nccl backend on the GPUs of this machine, and write a report",
    ),
    "backends": (
        "collectives.cli.backends",
        "list the backends, why some cannot be used here, and what they can do",
    ),
    "conformance": (
        "collectives.conformance.__main__",
        "examine backends of torch.distributed: every function with every data type",
    ),
    "demo": (
        "collectives.bench.demo",
        "train on real data over round-robin groups, then compare the backends",
    ),
    "doctor": (
        "collectives.bench.doctor",
        "test what this machine offers and that two ranks can communicate",
    ),
    "ps": (
        "collectives.cli.ps",
        "show what every rank of the jobs on this machine does now, also of those that hang",
    ),
    "trace": (
        "collectives.cli.trace",
        "put the flight records of several ranks together: where each was, and a trace for viewers",
    ),
}


class CommandError(Exception):
    """Ends the command with status 1 and this message, without a traceback of the command's own process."""


def printable(text: str) -> str:
    """Returns a text of another process or of a file without what would command the terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 for a failure, 2 for wrong arguments.

    Args:
        argv: arguments after the command's name; ``None`` for those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser(words).parse_args(words)
    if getattr(arguments, "imports", None) and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # for the user's modules, as under `python -m`
    before = signal.signal(signal.SIGTERM, _end)
    try:
        # The ranks that it starts are of one job; those of a launcher would each have another secret.
        with nullcontext() if arguments.every_rank else provided():
            status: int = arguments.run(arguments) if _takes_part(arguments) else 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("collectives: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except CommandError as error:
        print(f"collectives: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe has left; nothing more can be printed, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:
        signal.signal(signal.SIGTERM, before)
    return status


def _takes_part(arguments: argparse.Namespace) -> bool:
    """Returns whether this process carries the command out: of those of ``mpirun`` one does, or every one."""
    job = mpi_job.current()
    if job is None or arguments.every_rank:
        return True
    if job.rank:
        return False
    if job.local_size < job.size:
        raise CommandError(
            f"mpirun started {job.size} processes, but only {job.local_size} of them on this machine, on "
            "which this command starts all of its ranks; leave mpirun out, or start all on one machine"
        )
    mpi_job.leave()
    return True


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    """Unwinds on SIGTERM, so that ranks and files are cleared away."""
    raise SystemExit(128 + number)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser; only the sub-command that ``words`` begins with has its arguments."""
    parser = argparse.ArgumentParser(
        prog="collectives",
        description="Collective communication for PyTorch tensors: demo, measurements, checks.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"collectives {importlib.metadata.version('torch-collectives')}",
    )
    children = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in PROGRAMS.items():
        _add_program(children, name, module, summary, wanted=words[:1] == [name])
    bench = children.add_parser(
        "bench",
        help="measure one thing across backends",
        description="Measurements, one program per question.",
    )
    if words[:1] == ["bench"]:
        questions = bench.add_subparsers(required=True, metavar="PROGRAM")
        for name, module in importlib.import_module("collectives.bench").PROGRAMS.items():
            summary = (importlib.import_module(module).__doc__ or "").partition("\n")[0]
            _add_program(questions, name, module, summary, wanted=True)
    return parser


def _add_program(children: Any, name: str, module: str, summary: str, *, wanted: bool) -> None:
    if not wanted:
        children.add_parser(name, help=summary)
        return
    program = importlib.import_module(module)
    parser = children.add_parser(
        name, help=summary, description=program.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    program.add_arguments(parser)
    parser.set_defaults(run=program.run, every_rank=getattr(program, "EVERY_RANK", False))
