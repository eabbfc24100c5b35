"""A comparison of peers at operations, sizes and numbers of ranks; what the programs of it share.

Calls go through the public functions of ``collectives``. For every call the ranks leave a barrier of the
bench's own together, each takes its duration with its own clock, and the slowest rank's counts. Peers take
turns at each size.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from collectives.backends.algorithms import ALGORITHMS
from collectives.backends.nccl.library import loading
from collectives.bench.comparison import mpi4py_peer, patterns, torch_peer
from collectives.bench.comparison.algorithm_peer import split_name
from collectives.bench.comparison.mpi4py_peer import MPI4PY
from collectives.bench.comparison.operations import OPERATIONS, rounded_count
from collectives.bench.comparison.player import Workload, memory_bytes
from collectives.bench.comparison.sweep import Schedule, sweep
from collectives.bench.core.arguments import (
    add_iterations,
    add_json,
    add_team,
    at_least,
    check_plot,
    failing_as_command,
    parse_counts,
    parse_names,
    parse_sizes_argument,
    show_progress,
)
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.goals import goal_lines, parse_goal
from collectives.bench.core.launching import needs_mpirun
from collectives.bench.core.machine import cores_of_ranks, describe_machine
from collectives.bench.core.namespaces import NamespacesUnavailableError, burst_bytes
from collectives.bench.core.plot import plot
from collectives.bench.core.ranks import RankFailedError
from collectives.bench.core.records import Record, Report, Skipped, write_json
from collectives.bench.core.sizes import format_bytes, parse_sizes
from collectives.bench.core.table import brief_line, header_lines, report_lines, skipped_lines
from collectives.cli import CommandError
from collectives.cli.mpi_job import usual_ranks
from collectives.registry.backends import backend_names, backend_spec, why_unavailable

__all__ = [
    "DTYPES",
    "Options",
    "add_arguments",
    "available_backends",
    "measure",
    "run",
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
        backends: names of backends, and of peers such as ``torch:gloo`` and ``host:ring``; ``None`` for all
            backends that serve tensors on the device, and plain mpi4py or ``torch:nccl``.
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
        goals: what is asked of the times, as :mod:`collectives.bench.core.goals` reads it.
        machines: number of network namespaces that play machines, with equal shares of the ranks; 1 for
            none.
        link: what each of them can send, in the units of ``tc``; ``None`` does not limit it.
        device: type of the device that the tensors are on, a name of
            :data:`~collectives.bench.core.devices.DEVICES`.
        provider: package by which the nccl backend calls NCCL; ``None`` leaves it to the environment.

    Raises:
        ValueError: a backend or an operation is not known, a goal cannot be read, a size is no multiple of
            the element's, there is no such device or provider, too little memory or too few cores, or the
            machines do not fit the ranks or the device.
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
    device: str = "cpu"
    provider: str | None = None

    def __post_init__(self) -> None:
        for module in self.imports:
            importlib.import_module(module)
        for name in self.backends or ():
            if _is_ours(name):
                backend_spec(split_name(name)[0])
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
        if self.bind:
            cores_of_ranks(max(self.ranks))
        self._check_machines()
        self._check_device()
        for ranks in self.ranks:
            needed = memory_bytes(self.workload((), ranks))
            available = DEVICES[self.device].memory_per_rank_bytes(ranks)
            if needed > available:
                raise ValueError(
                    f"{ranks} ranks with tensors of {format_bytes(max(self.sizes))} need "
                    f"{ranks * needed / 2**30:.1f} GiB of memory, but {ranks * available / 2**30:.1f} GiB "
                    "are available"
                )

    def _check_machines(self) -> None:
        for ranks in self.ranks:
            if self.machines > 1 and ranks % self.machines:
                raise ValueError(f"{ranks} ranks cannot be shared equally among {self.machines} machines")
        if self.link is not None and self.machines == 1:
            raise ValueError("a link joins machines; ask for 2 or more of them")
        if self.link is not None:
            burst_bytes(self.link)  # refuses what is no rate
        if self.machines > 1 and self.device != "cpu":
            raise ValueError(f"machines are played for tensors on the CPU, not on {self.device}")

    def _check_device(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"unknown device {self.device!r}; known are {', '.join(DEVICES)}")
        reason = DEVICES[self.device].why_unavailable()
        if reason is not None:
            raise ValueError(f"tensors on {self.device} cannot be measured here: {reason}")
        if self.provider is not None and self.provider not in loading.PROVIDERS:
            raise ValueError(
                f"unknown provider {self.provider!r} of NCCL; known are {', '.join(loading.PROVIDERS)}"
            )
        if self.provider is not None and self.device == "cpu":
            raise ValueError("a provider of NCCL serves tensors on cuda; ask for that device")

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
            cores_of_ranks(ranks) if self.bind else (),
            self.machines,
            self.link,
            device=self.device,
            provider=self.provider,
        )


def available_backends(
    names: Sequence[str] | None, device: str = "cpu", provider: str | None = None
) -> tuple[list[str], list[Skipped]]:
    """Returns the backends that this machine can run, and the others with reasons.

    Args:
        names: backends and other peers to look at, in order; ``None`` for all backends, and plain mpi4py or
            torch's NCCL.
        device: type of the tensors' device, which must be there.
        provider: package by which the nccl backend calls NCCL; ``None`` leaves it to the environment.

    Raises:
        ValueError: a name is not known.
    """
    if names is None:
        first, other = {"cpu": ("host", MPI4PY), "cuda": ("nccl", torch_peer.NCCL)}[device]
        names = [*sorted(backend_names(), key=lambda name: (name != first, name)), other]
    available: list[str] = []
    skipped: list[Skipped] = []
    for name in dict.fromkeys(names):
        peer = _full_name(name) if _is_ours(name) else name
        reason, install = _why_not_here(peer, device, provider)
        if reason is None:
            available.append(peer)
        else:
            skipped.append(Skipped(peer, reason, install))
    return available, skipped


def _is_ours(name: str) -> bool:
    """Returns whether a peer's name is that of a backend of ours, or of an algorithm over it."""
    return name != MPI4PY and not name.startswith(torch_peer.PREFIX)


def _full_name(name: str) -> str:
    backend, algorithm = split_name(name)
    spelled = backend_spec(backend).name
    return spelled if algorithm is None else f"{spelled}:{algorithm}"


def _why_not_here(name: str, device: str, provider: str | None) -> tuple[str | None, str]:
    """Returns why a peer cannot be measured, ``None`` where it can, and the command that would add it."""
    if name.startswith(torch_peer.PREFIX):
        return torch_peer.why_unavailable(name, device), ""
    here = "the CPU" if device == "cpu" else device
    if name == MPI4PY:
        if device != "cpu":
            return f"serves tensors on cpu, and this measures tensors on {here}", ""
        return mpi4py_peer.why_unavailable(), mpi4py_peer.INSTALL
    backend, algorithm = split_name(name)
    spec = backend_spec(backend)
    chosen = spec.name == "nccl" and provider is not None
    reason = loading.unavailable(provider) if chosen else why_unavailable(spec.name)
    if reason is None and device not in spec.devices:
        reason = f"serves tensors on {', '.join(spec.devices)}, and this measures tensors on {here}"
    if reason is None and algorithm is not None and device != "cpu":
        reason = f"reduces tensors on the CPU, and this measures tensors on {here}"
    if reason is None and needs_mpirun(name):
        reason = mpi4py_peer.why_unavailable()
    return reason, spec.install


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
    backends, skipped = available_backends(options.backends, options.device, options.provider)
    for name in list(backends):
        if options.machines > 1 and (name == MPI4PY or needs_mpirun(name)):
            backends.remove(name)
            skipped.append(Skipped(name, "mpirun would start its ranks on one machine only", ""))
    versions: dict[str, str] = {}
    described = DEVICES[options.device].describe(options.ranks)
    environment = {**describe_machine(), **described, "peers": versions}
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
        "--provider",
        choices=loading.PROVIDERS,
        help=f"package by which the nccl backend calls NCCL (default: {loading.PROVIDER_VARIABLE}, or else "
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
        "--op", choices=patterns.OPERATIONS, default="sum", help="reduction (default: %(default)s)"
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
    add_team(parser)
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
    add_json(parser)
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
        )
    with failing_as_command(RankFailedError, NamespacesUnavailableError):
        report = measure(options, show_progress, _show_point if quick else None, program)
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
