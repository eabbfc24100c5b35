"""A comparison of peers at operations, sizes and numbers of ranks; what the programs of it share.

Calls go through the public functions of ``collectives``. For every call the ranks leave a barrier of the
bench's own together, each takes its duration with its own clock, and the slowest rank's counts. Peers take
turns at each size.
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
from collectives.bench.goals import goal_lines, parse_goal
from collectives.bench.machine import describe_machine, memory_available_bytes, usable_cores
from collectives.bench.mpi4py_peer import MPI4PY
from collectives.bench.namespaces import NamespacesUnavailableError
from collectives.bench.operations import OPERATIONS, rounded_count
from collectives.bench.player import Workload, memory_bytes
from collectives.bench.plot import plot
from collectives.bench.ranks import RankFailedError
from collectives.bench.records import Record, Report, Skipped, write_json
from collectives.bench.sizes import format_bytes, parse_sizes
from collectives.bench.sweep import Schedule, sweep
from collectives.bench.table import brief_line, header_lines, report_lines, skipped_lines
from collectives.cli import CommandError
from collectives.registry import backend_names, backend_spec, why_unavailable

__all__ = [
    "DTYPES",
    "Options",
    "add_arguments",
    "at_least",
    "available_backends",
    "measure",
    "parse_names",
    "parse_sizes_argument",
    "run",
    "show_progress",
]

READING = """\
- *cold* calls rotate through buffers that were all rewritten since they were last used, as gradients are;
- *hot* calls reuse one buffer as it is, as many benchmarks do, with flattering figures for small and middle
  sizes;
- *loop* is the time of one call in a row of many without a barrier, for small sizes.

Columns and bandwidths are those of nccl-tests: size is that of the whole array, algbw = size / time,
busbw = algbw * 2(n-1)/n of an all-reduce, algbw * (n-1)/n where the array consists of a part for each
rank, in 1e9 bytes a second. ``#wrong`` counts elements over all calls and ranks that differ from a formula of
rank. With ``--limit`` the last column is the part of the in-place memory limit that the first peer reaches:
the time of ``tensor.add_(0)`` over an array of the size on all ranks at once, over the peer's.

Goals, each ``--goal``:
PEER[.KIND] <= PEER[.KIND] [/ FACTOR | * FACTOR] [+ X us] [@ SIZES] [; ops NAME,...] [; ranks N,...]
for example ``host <= mpi4py/1.2 @ 16K:64K; ranks 2`` or ``host.loop <= mpi4py.loop + 0.8 us``."""
"""How to read the tables; part of the programs' descriptions."""

QUICK_SIZES = "1K,1M,64M"
QUICK_BUDGET_S = 6.0

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
        sizes: sizes of the arrays in bytes, ascending; rounded up to a whole part for each rank.
        operations: names of the operations.
        dtype: name of the data type.
        redop: name of the reduction.
        in_place: whether an all-reduce reduces the user's tensor itself, else a copy of it, with the copy in
            the time.
        calls: cold and hot calls of each peer at each size; ``None`` adapts to the budget.
        warmup: calls before; ``None`` adapts to the budget.
        budget_s: seconds that each run should take.
        limit: whether to measure ``tensor.add_(0)`` on all ranks, too.
        imports: modules that register further backends; imported here and on every rank.
        bind: whether each rank stays on a core of its own.
        goals: what is asked of the times, as :mod:`collectives.bench.goals` reads it.
        machines: number of network namespaces that play machines, with equal shares of the ranks; 1 for
            none.
        link: what each of them can send, in the units of ``tc``; ``None`` does not limit it.

    Raises:
        ValueError: a backend or an operation is not known, a goal cannot be read, a size is no multiple of
            the element's, there is too little memory or too few cores, or the machines do not fit the ranks.
    """

    backends: tuple[str, ...] | None = None
    ranks: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = tuple(parse_sizes("8:64M"))
    operations: tuple[str, ...] = ("all_reduce",)
    dtype: str = "float32"
    redop: str = "sum"
    in_place: bool = True
    calls: int | None = None
    warmup: int | None = None
    budget_s: float = 40.0
    limit: bool = False
    imports: tuple[str, ...] = ()
    bind: bool = False
    goals: tuple[str, ...] = ()
    machines: int = 1
    link: str | None = None

    def __post_init__(self) -> None:
        for module in self.imports:
            importlib.import_module(module)
        for name in self.backends or ():
            if name != MPI4PY:
                backend_spec(name)
        for name in self.operations:
            if name not in OPERATIONS:
                raise ValueError(f"unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
        for goal in self.goals:
            parse_goal(goal)
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
        self._check_machines()
        needed = max(ranks * memory_bytes(self.workload((), ranks)) for ranks in self.ranks)
        available = memory_available_bytes()
        if needed > available:
            raise ValueError(
                f"{max(self.ranks)} ranks with tensors of {format_bytes(max(self.sizes))} need "
                f"{needed / 2**30:.1f} GiB of memory, but {available / 2**30:.1f} GiB are available"
            )

    def _check_machines(self) -> None:
        for ranks in self.ranks:
            if self.machines > 1 and ranks % self.machines:
                raise ValueError(f"{ranks} ranks cannot be shared equally among {self.machines} machines")
        if self.link is not None and self.machines == 1:
            raise ValueError("a link joins machines; ask for 2 or more of them")

    def workload(self, backends: Sequence[str], ranks: int) -> Workload:
        """Returns what so many ranks measure with these peers."""
        item_bytes = getattr(torch, self.dtype).itemsize
        return Workload(
            self.dtype,
            self.redop,
            self.in_place,
            item_bytes
            * max(
                rounded_count(OPERATIONS[name], max(self.sizes), item_bytes, ranks)
                for name in self.operations
            ),
            tuple(backends),
            self.operations,
            self.limit,
            self.imports,
            self.bind,
            self.machines,
            self.link,
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


def measure(
    options: Options,
    progress: Callable[[str], object] | None = None,
    found: Callable[[Sequence[Record]], object] | None = None,
    program: str = "allreduce",
) -> Report:
    """Runs the measurement and returns its report; peers that cannot run here are in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.
        found: called with the records of all peers at one operation and size as soon as they are there.
        program: name of the program that asks.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    backends, skipped = available_backends(options.backends)
    if options.machines > 1 and MPI4PY in backends:
        backends.remove(MPI4PY)
        skipped.append(Skipped(MPI4PY, "mpirun would start its ranks on one machine only", ""))
    versions: dict[str, str] = {}
    environment = {**describe_machine(), "peers": versions}
    report = Report(program, environment, asdict(options), skipped=skipped)
    schedule = Schedule(options.sizes, options.calls, options.warmup, options.budget_s)
    if backends or options.limit:
        for ranks in options.ranks:
            findings = sweep(ranks, options.workload(backends, ranks), schedule, progress, found)
            report.records += findings.records
            report.skipped += findings.skipped
            versions |= findings.versions
    return report


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
        help="backends, and mpi4py for plain mpi4py under mpirun (default: all usable here)",
    )
    parser.add_argument(
        "--nproc", type=_counts, default=(2,), metavar="N,...", help="numbers of ranks (default: 2)"
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
        "--op", choices=patterns.OPERATIONS, default="sum", help="reduction (default: %(default)s)"
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
        metavar="SECONDS",
        help=f"time that each run should take (default: {budget_s:g}, quick: {QUICK_BUDGET_S:g})",
    )
    parser.add_argument(
        "--limit",
        action="store_true",
        help="measure the memory limit too: tensor.add_(0) on all ranks at the same time",
    )
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
    parser.add_argument(
        "--goal",
        dest="goals",
        action="append",
        default=[],
        metavar="GOAL",
        help="what a peer's time must not exceed; the summary tells which goals are met (see above)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time and bus bandwidth over size into FILE (PNG)"
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
    budget = arguments.budget or (QUICK_BUDGET_S if quick else arguments.default_budget)
    try:
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
        )
    except ValueError as error:
        raise CommandError(str(error)) from None
    try:
        report = measure(options, show_progress, _show_point if quick else None, program)
    except (RankFailedError, NamespacesUnavailableError) as error:
        raise CommandError(str(error)) from error
    finally:
        show_progress("")
    header = header_lines(report)
    print("\n".join([*header, *(skipped_lines(report.skipped) if quick else report_lines(report))]))
    verdicts, goals_met = goal_lines([parse_goal(goal) for goal in options.goals], report.records)
    if verdicts:
        print("\n".join(["", *verdicts]))
    if arguments.json is not None:
        write_json(arguments.json, report.as_json())
    if arguments.plot is not None and any(record.size_bytes for record in report.records):
        plot(report, arguments.plot)
    is_right = report.records and not any(record.wrong_elements for record in report.records)
    return 0 if is_right and goals_met else 1


def _show_point(records: Sequence[Record]) -> None:
    show_progress("")
    print(brief_line(records), flush=True)


def show_progress(line: str) -> None:
    """Shows a line in place of the last where stderr is a terminal, else nothing; an empty one wipes it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def parse_names(text: str) -> tuple[str, ...]:
    """Returns the names of a command-line argument, separated by commas."""
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
