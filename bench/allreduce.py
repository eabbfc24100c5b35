"""How long does an all-reduce take, or another collective, by backend, size and number of ranks?

Calls go through the public functions, such as ``collectives.all_reduce``. Before every call the ranks leave a
barrier together; each rank times the call with its own clock, and the slowest rank counts. Peers alternate in
batches of a few calls, so that noise of the machine meets all of them alike.

- *cold* calls rotate through buffers that were all rewritten since they were last used, as gradients are;
- *hot* calls reuse one buffer, as many benchmarks do, which flatters small and middle sizes;
- *loop* is the time of one call in a row of many without a barrier, for small sizes.

Columns and bandwidths are those of nccl-tests: size is that of the whole array, algbw = size / time,
busbw = algbw * 2(n-1)/n of an all-reduce, algbw * (n-1)/n where the array consists of a part for each
rank, in 1e9 bytes a second. ``#wrong`` counts elements over all calls and ranks that differ from a formula of
rank. ``sendrecv`` is half of a ping-pong between neighbours, all pairs at once; the root is rank 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory

from collectives.backends.host.threads import MOST
from collectives.bench.comparison.operations import OPERATIONS, ROOT, rounded_count
from collectives.bench.comparison.options import SIZES, Options
from collectives.bench.comparison.peers import (
    INSTALL_MPI4PY,
    MPI4PY,
    TORCH,
    TORCH_NCCL,
    is_mpi4py,
    is_own_backend,
    split_name,
    threads_of,
    why_no_mpi4py,
    why_no_torch,
)
from collectives.bench.comparison.records import Record, Report
from collectives.bench.comparison.worker import Batch, BatchResult, Ready, run_mpi4py, run_worker
from collectives.bench.core.arguments import (
    add_files,
    add_options,
    conclude,
    failing_as_command,
    options_from,
    show_progress,
)
from collectives.bench.core.devices import why_not_on
from collectives.bench.core.namespaces import NamespacesUnavailableError
from collectives.bench.core.ranks import rounds_of, share_of
from collectives.bench.core.records import Skipped, Timing, usable
from collectives.ranks.mpirun import Mpirun, find_mpirun, needs_mpirun
from collectives.ranks.processes import RankFailedError, RankProcesses
from collectives.registry.backends import backend_names, backend_spec, why_unavailable

__all__ = ["Options", "add_arguments", "measure", "run"]

ROUNDS = 10
"""Batches of each peer at each size."""

MIN_CALLS = 5
MAX_CALLS = 200
"""Calls of each peer at each size where the user names no number; the budget decides between the two."""

WARMUP = 5
"""Calls before those that count, where the budget allows so many."""

WARMUP_SHARE = 0.15
"""Part of the budget that may go into them."""

LOOP_MAX_BYTES = 32 << 10
"""Largest size that is also measured by a loop."""

LOOP_NS = 5_000_000
"""Time that one loop should take, with at least and at most so many calls:"""
LOOP_MIN_CALLS = 10
LOOP_MAX_CALLS = 500

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Point:
    """An operation at a size.

    Attributes:
        operation: its name.
        count: elements of the array.
        size_bytes: its bytes.
    """

    operation: str
    count: int
    size_bytes: int


class _Peer:
    """What is known of a peer at one point.

    Args:
        name: its name.
        processes: the ranks that measure it.
        point: the operation and its size.
    """

    def __init__(self, name: str, processes: RankProcesses, point: Point) -> None:
        self.name = name
        self.processes = processes
        self.point = point
        self.calls = 0
        self.loop_calls = 0
        self.times: dict[str, list[list[int]]] = {
            kind: [[] for _ in range(processes.size)] for kind in ("cold", "hot", "loop", "host")
        }
        """Nanoseconds by rank, then by call."""
        self.cold_wrong = 0
        self.hot_wrong = 0

    def run(self, calls: int, loop_calls: int = 0, *, timed: bool = True) -> list[BatchResult]:
        """Has the ranks run a batch and takes their results, the durations only where ``timed``."""
        batch = Batch(self.name, self.point.operation, self.point.count, calls, calls, loop_calls)
        results: list[BatchResult] = self.processes.ask(batch)
        self.cold_wrong += sum(result.cold_wrong for result in results)
        self.hot_wrong += sum(result.hot_wrong for result in results)
        for kind, ranks in self.times.items() if timed else ():
            for mine, result in zip(ranks, results, strict=True):
                mine.extend(getattr(result, f"{kind}_ns"))
        return results

    def prepare(self, options: Options, budget_s: float) -> None:
        """Warms the peer up, and decides how often it is called."""
        self.run(1, timed=False)
        begin = time.monotonic()
        self.run(1, timed=False)
        both_s = time.monotonic() - begin  # a cold and a hot call, with all that is done around them
        warmup = options.warmup
        if warmup is None:
            warmup = min(WARMUP, int(WARMUP_SHARE * budget_s / both_s))
        if warmup > 2:
            begin = time.monotonic()
            self.run(warmup - 2, timed=False)
            both_s = (time.monotonic() - begin) / (warmup - 2)
        possible = int((1 - WARMUP_SHARE) * budget_s / both_s)
        self.calls = options.calls or max(MIN_CALLS, min(MAX_CALLS, possible))
        if self.point.size_bytes <= LOOP_MAX_BYTES:
            self.loop_calls = LOOP_MIN_CALLS
            # In a short loop the wait for ranks that start late weighs much: its length takes two steps.
            for _ in range(2):
                results = self.run(0, self.loop_calls, timed=False)
                loop_ns = max(result.loop_ns[0] for result in results)
                self.loop_calls = max(LOOP_MIN_CALLS, min(LOOP_MAX_CALLS, LOOP_NS // max(loop_ns, 1)))

    def record(self, options: Options) -> Record:
        """Returns what was found."""
        operation = OPERATIONS[self.point.operation]
        times = {kind: Timing.of(ranks) if ranks[0] else None for kind, ranks in self.times.items()}
        return Record(
            operation=operation.name,
            peer=self.name,
            ranks=self.processes.size,
            size_bytes=self.point.size_bytes,
            count_elements=self.point.count,
            dtype=options.dtype,
            redop=options.redop if operation.reduces else "none",
            in_place=operation.in_place and (options.in_place or operation.name != "all_reduce"),
            cold_wrong_elements=self.cold_wrong,
            hot_wrong_elements=self.hot_wrong,
            root=ROOT if operation.rooted else -1,
            device=options.device,
            **times,  # type: ignore[arg-type]
        )


def measure(options: Options, progress: Progress | None = None, program: str = "allreduce") -> Report:
    """Returns the report of a measurement that it runs; peers that cannot run here are in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.
        program: name of the program that asks.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    backends, skipped = available_backends(options.peers(), options.device, dict(options.mpis))
    environment = {**options.environment(options.ranks), "peers": {}}
    report = Report(program, environment, asdict(options), skipped=skipped)
    for ranks in options.ranks if backends else ():
        lacking: list[Skipped] = []
        fitting = usable(backends, partial(_why_no_cores, ranks, options), lacking)
        report.skipped += [replace(one, ranks=ranks) for one in lacking]
        with ExitStack() as stack:
            _measure_points(report, ranks, _start(stack, ranks, fitting, options), options, progress)
    return report


def _why_no_cores(ranks: int, options: Options, name: str) -> tuple[str | None, str]:
    """Returns why bound ranks cannot have the threads of a peer, ``None`` where they can; and no command."""
    threads = threads_of(*split_name(name)) if is_own_backend(name) else None
    cores = min(map(len, options.cores_to_bind(ranks))) if options.bind else MOST
    if threads is None or threads <= cores:
        return None, ""
    return f"needs {threads} cores for each rank, and there are {cores}", ""


def _start(
    stack: ExitStack, ranks: int, backends: Sequence[str], options: Options
) -> dict[str, RankProcesses]:
    """Returns the ranks that measure, by peer; the stack ends them."""
    machines = stack.enter_context(options.make_machines())
    between: Callable[[Mpirun], Mpirun] | None = None
    if machines is not None:
        agent = machines.write_agent(stack.enter_context(TemporaryDirectory(prefix="collectives-")))
        addresses = [machines.address(machine) for machine in range(len(machines))]
        between = partial(Mpirun.between, machines=addresses, own=machines.host, agent=agent, ranks=ranks)

    def mpirun_of(prefix: str | None) -> Mpirun:
        mpirun = find_mpirun(prefix)
        if mpirun is None:
            raise FileNotFoundError(f"there is no mpirun in {prefix or 'PATH'} any more")
        return mpirun if between is None else between(mpirun)

    own = tuple(name for name in backends if not is_mpi4py(name))
    teams: dict[str, RankProcesses] = {}
    if own:
        mpirun = mpirun_of(None) if any(map(needs_mpirun, own)) else None
        told = replace(options, backends=own)
        processes = stack.enter_context(
            told.start(run_worker, ranks, told, backends=own, machines=machines, mpirun=mpirun)
        )
        teams |= dict.fromkeys(own, processes)
    for name in filter(is_mpi4py, backends):
        mpirun = mpirun_of(dict(options.mpis).get(name.partition(":")[2]))
        told = replace(options, backends=(name,), imports=())
        teams[name] = stack.enter_context(
            told.start(run_mpi4py, ranks, told, backends=["mpi"], mpirun=mpirun)
        )
    return {name: teams[name] for name in backends}


def _measure_points(
    report: Report,
    ranks: int,
    teams: Mapping[str, RankProcesses],
    options: Options,
    progress: Progress | None,
) -> None:
    """Measures all peers at all operations and sizes, and adds what it finds to the report."""
    answers: list[Ready] = [processes.gather()[0] for processes in dict.fromkeys(teams.values())]
    refused = {what: why for ready in answers for what, why in ready.refused.items()}
    report.skipped += _skipped(refused, options.operations, ranks)
    for ready in answers:
        report.environment["peers"].update(ready.versions)
    points = [
        point
        for name in options.operations
        for point in points_of(name, options.sizes, options.item_bytes, ranks)
    ]
    end = time.monotonic() + options.budget_s
    for i, point in enumerate(points):
        if progress is not None:
            what = f"{point.operation}, {ranks} ranks, {point.size_bytes} B"
            progress(f"{what} ({i + 1} of {len(points)} measurements)")
        peers = [
            _Peer(name, processes, point)
            for name, processes in teams.items()
            if (name, point.operation) not in refused
        ]
        _measure(peers, options, max(0.0, end - time.monotonic()) / (len(points) - i))
        report.records += [peer.record(options) for peer in peers]


def _skipped(refused: Mapping[tuple[str, str], str], operations: Sequence[str], ranks: int) -> list[Skipped]:
    """Returns the entries of a report, one for a peer whose reason is the same at all operations."""
    skipped: list[Skipped] = []
    for peer in dict.fromkeys(peer for peer, _ in refused):
        reasons = {name: refused.get((peer, name)) for name in operations}
        if len(set(reasons.values())) == 1:
            reasons = {"": reasons[operations[0]]}
        skipped += [
            Skipped(peer, reason, ranks=ranks, operation=name)
            for name, reason in reasons.items()
            if reason is not None
        ]
    return skipped


def points_of(name: str, sizes: Sequence[int], item_bytes: int, ranks: int) -> list[Point]:
    """Returns what is measured of an operation: each size rounded up to whole parts, each once."""
    counts = dict.fromkeys(rounded_count(OPERATIONS[name], size, item_bytes, ranks) for size in sizes)
    return [Point(name, count, count * item_bytes) for count in counts]


def _measure(peers: Sequence[_Peer], options: Options, budget_s: float) -> None:
    """Measures peers at one point, batch by batch; each round begins with another peer.

    Where a noisy machine makes the plan too long, later rounds are left out.
    """
    end = time.monotonic() + budget_s
    for peer in peers:
        peer.prepare(options, budget_s / len(peers))
    for this, order in rounds_of(peers, ROUNDS):
        for peer in order:
            calls = share_of(peer.calls, this, ROUNDS)
            if calls or peer.loop_calls:
                peer.run(calls, peer.loop_calls)
        enough = options.calls is None and all(len(peer.times["cold"][0]) >= MIN_CALLS for peer in peers)
        if enough and time.monotonic() > end:
            break


def available_backends(
    names: Sequence[str] | None, device: str = "cpu", mpis: Mapping[str, str] | None = None
) -> tuple[list[str], list[Skipped]]:
    """Returns the backends that this machine can run, and the others with reasons.

    Args:
        names: backends and other peers to look at, in order; ``None`` for all backends, and plain mpi4py or
            torch's NCCL.
        device: type of the tensors' device, which must be there.
        mpis: folders of further installations of MPI, by name.

    Raises:
        ValueError: a name is not known.
    """
    mpis = mpis or {}
    if names is None:
        first, other = {"cpu": ("host", MPI4PY), "cuda": ("nccl", TORCH_NCCL)}[device]
        names = [*sorted(backend_names(), key=lambda name: (name != first, name)), other]
        names += [f"{MPI4PY}:{name}" for name in mpis] if device == "cpu" else []
    skipped: list[Skipped] = []
    full = dict.fromkeys(_full_name(name) if is_own_backend(name) else name for name in names)
    return usable(full, lambda name: _why_not_here(name, device, mpis), skipped), skipped


def _full_name(name: str) -> str:
    backend, algorithm = split_name(name)
    return ":".join(filter(None, (backend_spec(backend).name, algorithm)))


def _why_not_here(name: str, device: str, mpis: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns why a peer cannot be measured, ``None`` where it can, and the command that would add it."""
    if name.startswith(TORCH):
        return why_no_torch(name, device), ""
    if is_mpi4py(name):
        if device != "cpu":
            return f"serves tensors on cpu, and this measures tensors on {device}", ""
        return why_no_mpi4py(mpis.get(name.partition(":")[2])), INSTALL_MPI4PY
    backend, algorithm = split_name(name)
    spec = backend_spec(backend)
    reason = why_unavailable(spec.name) or why_not_on(device, spec)
    if reason is None and algorithm is not None and device != "cpu":
        reason = f"reduces tensors on the CPU, and this measures tensors on {device}"
    if reason is None and needs_mpirun(name):
        reason = why_no_mpi4py()
    return reason, spec.install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser.

    Args:
        parser: of the command ``collectives bench allreduce``.
    """
    add_options(parser, Options, sizes=SIZES)
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; blocks until it has printed its tables.

    Args:
        arguments: as :func:`add_arguments` describes them.

    Returns:
        The exit status: 1 where a result is wrong, else 0.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    options = options_from(Options, arguments)
    with failing_as_command(RankFailedError, NamespacesUnavailableError):
        report = measure(options, show_progress)
    return conclude(report, lambda record: not record.wrong_elements, arguments)
