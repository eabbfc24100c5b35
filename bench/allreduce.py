"""How long does an all-reduce take, by backend, size and number of ranks?

Calls go through the public function ``collectives.all_reduce``. For every call the ranks leave a barrier of
the bench's own together, each takes its duration with its own clock, and the slowest rank's counts. Peers
alternate at each size.

- *cold* calls rotate through buffers that were all rewritten since they were last used, as gradients are;
- *hot* calls reuse one buffer as it is, as many benchmarks do, with flattering figures for small and middle
  sizes;
- *loop* is the time of one call in a row of many without a barrier, for small sizes.

Columns and bandwidths are those of nccl-tests: algbw = size / time, busbw = algbw * 2(n-1)/n, in 1e9 bytes a
second. ``#wrong`` counts elements over all calls and ranks that differ from a formula of rank.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from collectives.bench import mpi4py_peer, patterns
from collectives.bench.machine import describe_machine, memory_available_bytes, usable_cores
from collectives.bench.mpi4py_peer import MPI4PY
from collectives.bench.player import Workload, memory_bytes
from collectives.bench.plot import plot
from collectives.bench.ranks import RankFailedError
from collectives.bench.records import Report, Skipped, write_json
from collectives.bench.sizes import format_bytes, parse_sizes
from collectives.bench.sweep import Schedule, sweep
from collectives.bench.table import header_lines, report_lines
from collectives.cli import CommandError
from collectives.registry import backend_names, backend_spec, why_unavailable

__all__ = [
    "Options",
    "add_arguments",
    "at_least",
    "available_backends",
    "measure",
    "parse_sizes_argument",
    "run",
    "show_progress",
]

DTYPES = tuple(
    sorted(
        name
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    )
)
"""Names of torch's data types."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        backends: names of backends; ``None`` for all that serve CPU tensors, and plain mpi4py.
        ranks: numbers of ranks; one run each.
        sizes: sizes of the tensors in bytes, ascending.
        dtype: name of the data type.
        redop: name of the reduction.
        in_place: whether the user's tensor is reduced itself, else a copy of it, with the copy in the time.
        calls: cold and hot calls of each peer at each size; ``None`` adapts to the budget.
        warmup: calls before; ``None`` adapts to the budget.
        budget_s: seconds that each run should take.
        limit: whether to measure ``tensor.add_(0)`` on all ranks, too.
        imports: modules that register further backends; imported here and on every rank.
        bind: whether each rank stays on a core of its own.

    Raises:
        ValueError: a backend is not known, a size is no multiple of the element's, or there is too little
            memory or too few cores.
    """

    backends: tuple[str, ...] | None = None
    ranks: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = tuple(parse_sizes("8:64M"))
    dtype: str = "float32"
    redop: str = "sum"
    in_place: bool = True
    calls: int | None = None
    warmup: int | None = None
    budget_s: float = 40.0
    limit: bool = False
    imports: tuple[str, ...] = ()
    bind: bool = False

    def __post_init__(self) -> None:
        for module in self.imports:
            importlib.import_module(module)
        for name in self.backends or ():
            if name != MPI4PY:
                backend_spec(name)
        item_bytes = getattr(torch, self.dtype).itemsize
        for size in self.sizes:
            if size % item_bytes:
                raise ValueError(
                    f"size {size} is no multiple of the {item_bytes} bytes of a {self.dtype} element; "
                    f"begin the sizes at {item_bytes} or more"
                )
        if self.bind and max(self.ranks) > usable_cores():
            raise ValueError(
                f"{max(self.ranks)} ranks cannot have a core each: {usable_cores()} can be used; do not bind"
            )
        needed, available = max(self.ranks) * memory_bytes(max(self.sizes)), memory_available_bytes()
        if needed > available:
            raise ValueError(
                f"{max(self.ranks)} ranks with tensors of {format_bytes(max(self.sizes))} need "
                f"{needed / 2**30:.1f} GiB of memory, but {available / 2**30:.1f} GiB are available"
            )


def available_backends(names: Sequence[str] | None) -> tuple[list[str], list[Skipped]]:
    """Returns the backends that this machine can run, and the others with reasons.

    Args:
        names: backends to look at, in order; ``None`` for all, and plain mpi4py.

    Raises:
        ValueError: a name is not known.
    """
    if names is None:
        names = [*sorted(backend_names(), key=lambda name: (name != "host", name)), MPI4PY]
    available: list[str] = []
    skipped: list[Skipped] = []
    for name in dict.fromkeys(names):
        if name == MPI4PY:
            reason = mpi4py_peer.why_unavailable()
            if reason is None:
                available.append(name)
            else:
                skipped.append(Skipped(name, reason, mpi4py_peer.INSTALL))
            continue
        spec = backend_spec(name)
        reason = why_unavailable(name)
        if reason is None and "cpu" not in spec.devices:
            reason = f"serves tensors on {', '.join(spec.devices)}, and this measures tensors on the CPU"
        if reason is None:
            available.append(spec.name)
        else:
            skipped.append(Skipped(spec.name, reason, spec.install))
    return available, skipped


def measure(options: Options, progress: Callable[[str], object] | None = None) -> Report:
    """Runs the measurement and returns its report; peers that cannot run here are in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
    """
    backends, skipped = available_backends(options.backends)
    report = Report("allreduce", describe_machine(), asdict(options), skipped=skipped)
    workload = Workload(
        options.dtype,
        options.redop,
        options.in_place,
        max(options.sizes),
        tuple(backends),
        options.limit,
        options.imports,
        options.bind,
    )
    schedule = Schedule(options.sizes, options.calls, options.warmup, options.budget_s)
    if backends or options.limit:
        for ranks in options.ranks:
            records, refused = sweep(ranks, workload, schedule, progress)
            report.records += records
            report.skipped += refused
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--backends",
        type=_names,
        metavar="NAME,...",
        help="backends, and mpi4py for plain mpi4py under mpirun (default: all usable here)",
    )
    parser.add_argument(
        "--nproc", type=_counts, default=(2,), metavar="N,...", help="numbers of ranks (default: 2)"
    )
    parser.add_argument(
        "--sizes",
        type=parse_sizes_argument,
        default="8:64M",
        metavar="SIZES",
        help="bytes: SIZE,..., FIRST:LAST[:FACTOR] or FIRST:LAST:+STEP; K, M, G (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", metavar="TYPE", help="data type (default: %(default)s)"
    )
    parser.add_argument(
        "--op", choices=patterns.OPERATIONS, default="sum", help="reduction (default: %(default)s)"
    )
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
    parser.add_argument(
        "--iters",
        type=at_least(1),
        metavar="N",
        help="calls of each peer at each size (default: 5 to 200, as the budget allows)",
    )
    parser.add_argument(
        "--warmup",
        type=at_least(2),
        metavar="N",
        help="calls before, not timed (default: 2 to 5, as the budget allows)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=40.0,
        metavar="SECONDS",
        help="time that each run should take (default: %(default)g)",
    )
    parser.add_argument(
        "--limit",
        action="store_true",
        help="measure the memory limit too: tensor.add_(0) on all ranks at the same time",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        type=_names,
        default=(),
        metavar="MODULE,...",
        help="modules that register further backends",
    )
    parser.add_argument(
        "--bind", action="store_true", help="keep each rank, with all its threads, on a core of its own"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time and bus bandwidth over size into FILE (PNG)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where a result is wrong or none exists.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib; install it with: python -m pip install matplotlib")
    try:
        options = Options(
            backends=arguments.backends,
            ranks=arguments.nproc,
            sizes=arguments.sizes,
            dtype=arguments.dtype,
            redop=arguments.op,
            in_place=arguments.in_place,
            calls=arguments.iters,
            warmup=arguments.warmup,
            budget_s=arguments.budget,
            limit=arguments.limit,
            imports=arguments.imports,
            bind=arguments.bind,
        )
    except ValueError as error:
        raise CommandError(str(error)) from None
    try:
        report = measure(options, show_progress)
    except RankFailedError as error:
        raise CommandError(str(error)) from error
    finally:
        show_progress("")
    print("\n".join([*header_lines(report), *report_lines(report)]))
    if arguments.json is not None:
        write_json(arguments.json, report.as_json())
    if arguments.plot is not None and report.records:
        plot(report, arguments.plot)
    return 1 if not report.records or any(record.wrong_elements for record in report.records) else 0


def show_progress(line: str) -> None:
    """Shows a line in place of the last where stderr is a terminal, else nothing; an empty one wipes it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(part) for part in text.split(","))


def parse_sizes_argument(text: str) -> tuple[int, ...]:
    """Returns the sizes of a command-line argument, as :func:`~collectives.bench.sizes.parse_sizes`."""
    try:
        return tuple(parse_sizes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least(least: int) -> Callable[[str], int]:
    """Returns a converter of command-line arguments to whole numbers that are not smaller than ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, but is {value}")
        return value

    number.__name__ = "int"  # argparse names it in messages
    return number
