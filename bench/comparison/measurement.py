"""The parent's side of a comparison: starts ranks, has them time batches of calls, collects the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory

from collectives.backends.nccl import providers
from collectives.bench.comparison.operations import ADD, OPERATIONS, ROOT, rounded_count
from collectives.bench.comparison.options import Options
from collectives.bench.comparison.peers import (
    INSTALL_MPI4PY,
    MPI4PY,
    TORCH,
    TORCH_NCCL,
    is_mpi4py,
    is_own_backend,
    split_name,
    why_no_mpi4py,
    why_no_torch,
)
from collectives.bench.comparison.records import Record, Report
from collectives.bench.comparison.worker import LIMIT, Batch, BatchResult, Ready, run_mpi4py, run_worker
from collectives.bench.core.devices import why_not_on
from collectives.bench.core.namespaces import Machines
from collectives.bench.core.ranks import rounds_of, share_of
from collectives.bench.core.records import Skipped, Timing
from collectives.ranks.mpirun import Mpirun, find_mpirun, needs_mpirun
from collectives.ranks.processes import RankProcesses
from collectives.registry.backends import backend_names, backend_spec, why_unavailable

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
Found = Callable[[Sequence[Record]], object]


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
        self.cold_wrong += sum(result.cold_wrong for result in results) + _left_early(results)
        self.hot_wrong += sum(result.hot_wrong for result in results)
        for kind, ranks in self.times.items() if timed else ():
            for mine, result in zip(ranks, results, strict=True):
                mine.extend(getattr(result, f"{kind}_ns"))
        return results


def _left_early(results: Sequence[BatchResult]) -> int:
    """Returns how many ranks left a barrier before the last had come."""
    crossings = zip(*(result.crossings_ns for result in results), strict=True)
    return sum(left < max(came for came, _ in all_ranks) for all_ranks in crossings for _, left in all_ranks)


def measure(
    options: Options,
    progress: Progress | None = None,
    found: Found | None = None,
    program: str = "allreduce",
) -> Report:
    """Returns the report of a measurement that it runs; peers that cannot run here are in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.
        found: called with the records of all peers at one operation and size as soon as they are there.
        program: name of the program that asks.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    backends, skipped = available_backends(
        options.backends, options.device, options.provider, dict(options.mpis)
    )
    environment = {**options.environment(options.ranks), "peers": {}}
    report = Report(program, environment, asdict(options), skipped=skipped)
    if backends or options.limit:
        for ranks in options.ranks:
            with ExitStack() as stack:
                teams = _start(stack, ranks, backends, options)
                _measure_points(report, ranks, teams, options, progress or _ignore, found or _ignore)
    return report


def _ignore(_: object) -> None:
    pass


def _start(
    stack: ExitStack, ranks: int, backends: Sequence[str], options: Options
) -> dict[str, RankProcesses]:
    """Returns the ranks that measure, by peer; the stack ends them."""
    machines: Machines | None = None
    between: Callable[[Mpirun], Mpirun] | None = None
    if options.machines > 1:
        machines = stack.enter_context(Machines(options.machines, options.link))
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
    if own or options.limit:
        mpirun = mpirun_of(None) if any(map(needs_mpirun, own)) else None
        told = replace(options, backends=own)
        processes = stack.enter_context(
            told.start(run_worker, ranks, told, backends=own, machines=machines, mpirun=mpirun)
        )
        teams |= dict.fromkeys((*own, *((LIMIT,) if options.limit else ())), processes)
    for name in filter(is_mpi4py, backends):
        mpirun = mpirun_of(dict(options.mpis).get(name.partition(":")[2]))
        told = replace(options, backends=(name,), limit=False, imports=())
        teams[name] = stack.enter_context(
            told.start(run_mpi4py, ranks, told, backends=["mpi"], mpirun=mpirun)
        )
    order = [*backends, *((LIMIT,) if options.limit else ())]
    return {name: teams[name] for name in order}


def _measure_points(
    report: Report,
    ranks: int,
    teams: Mapping[str, RankProcesses],
    options: Options,
    progress: Progress,
    found: Found,
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
        what = f"{point.operation}, {ranks} ranks, {point.size_bytes} B"
        progress(f"{what} ({i + 1} of {len(points)} measurements)")
        peers = [
            _Peer(name, processes, point)
            for name, processes in teams.items()
            if (name, point.operation) not in refused and not (name == LIMIT and point.operation == "barrier")
        ]
        left_s = max(0.0, end - time.monotonic()) / (len(points) - i)
        _measure(peers, options, left_s)
        records = [_record(options, peer) for peer in peers]
        report.records += records
        if records:
            found(records)


def _skipped(refused: Mapping[tuple[str, str], str], operations: Sequence[str], ranks: int) -> list[Skipped]:
    """Returns the entries of a report, one for a peer whose reason is the same at all operations."""
    skipped: list[Skipped] = []
    for peer in dict.fromkeys(peer for peer, _ in refused):
        reasons = [refused.get((peer, name)) for name in operations]
        if len(set(reasons)) == 1:
            skipped.append(Skipped(peer, reasons[0] or "", ranks=ranks))
            continue
        skipped += [
            Skipped(peer, reason, ranks=ranks, operation=name)
            for name, reason in zip(operations, reasons, strict=True)
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
        _prepare(peer, options, budget_s / len(peers))
    for this, order in rounds_of(peers, ROUNDS):
        for peer in order:
            calls = share_of(peer.calls, this, ROUNDS)
            if calls or peer.loop_calls:
                peer.run(calls, peer.loop_calls)
        enough = options.calls is None and all(len(peer.times["cold"][0]) >= MIN_CALLS for peer in peers)
        if enough and time.monotonic() > end:
            break


def _prepare(peer: _Peer, options: Options, budget_s: float) -> None:
    """Warms a peer up, and decides how often it is called."""
    peer.run(1, timed=False)
    begin = time.monotonic()
    peer.run(1, timed=False)
    both_s = time.monotonic() - begin  # a cold and a hot call, with all that is done around them
    warmup = options.warmup
    if warmup is None:
        warmup = min(WARMUP, int(WARMUP_SHARE * budget_s / both_s))
    if warmup > 2:
        begin = time.monotonic()
        peer.run(warmup - 2, timed=False)
        both_s = (time.monotonic() - begin) / (warmup - 2)
    peer.calls = options.calls or max(MIN_CALLS, min(MAX_CALLS, int((1 - WARMUP_SHARE) * budget_s / both_s)))
    if peer.point.size_bytes <= LOOP_MAX_BYTES:
        peer.loop_calls = LOOP_MIN_CALLS
        # In a short loop the wait for ranks that start late weighs much, so its length is found in two steps.
        for _ in range(2):
            results = peer.run(0, peer.loop_calls, timed=False)
            loop_ns = max(result.loop_ns[0] for result in results)
            peer.loop_calls = max(LOOP_MIN_CALLS, min(LOOP_MAX_CALLS, LOOP_NS // max(loop_ns, 1)))


def _record(options: Options, peer: _Peer) -> Record:
    operation = ADD if peer.name == LIMIT else OPERATIONS[peer.point.operation]
    times = {kind: Timing.of(ranks) if ranks[0] else None for kind, ranks in peer.times.items()}
    return Record(
        operation=operation.name,
        peer=peer.name,
        ranks=peer.processes.size,
        size_bytes=peer.point.size_bytes,
        count_elements=peer.point.count,
        dtype=options.dtype,
        redop=options.redop if operation.reduces else "none",
        in_place=operation.in_place and (options.in_place or operation.name != "all_reduce"),
        cold_wrong_elements=peer.cold_wrong,
        hot_wrong_elements=peer.hot_wrong,
        root=ROOT if operation.rooted else -1,
        compared_as=peer.point.operation,
        device=options.device,
        **times,  # type: ignore[arg-type]
    )


def available_backends(
    names: Sequence[str] | None,
    device: str = "cpu",
    provider: str | None = None,
    mpis: Mapping[str, str] | None = None,
) -> tuple[list[str], list[Skipped]]:
    """Returns the backends that this machine can run, and the others with reasons.

    Args:
        names: backends and other peers to look at, in order; ``None`` for all backends, and plain mpi4py or
            torch's NCCL.
        device: type of the tensors' device, which must be there.
        provider: package that loads NCCL for the nccl backend; ``None`` leaves it to the environment.
        mpis: folders of further installations of MPI, by name.

    Raises:
        ValueError: a name is not known.
    """
    mpis = mpis or {}
    if names is None:
        first, other = {"cpu": ("host", MPI4PY), "cuda": ("nccl", TORCH_NCCL)}[device]
        names = [*sorted(backend_names(), key=lambda name: (name != first, name)), other]
        names += [f"{MPI4PY}:{name}" for name in mpis] if device == "cpu" else []
    available: list[str] = []
    skipped: list[Skipped] = []
    for name in dict.fromkeys(names):
        peer = _full_name(name) if is_own_backend(name) else name
        reason, install = _why_not_here(peer, device, provider, mpis)
        if reason is None:
            available.append(peer)
        else:
            skipped.append(Skipped(peer, reason, install))
    return available, skipped


def _full_name(name: str) -> str:
    backend, algorithm = split_name(name)
    spelled = backend_spec(backend).name
    return spelled if algorithm is None else f"{spelled}:{algorithm}"


def _why_not_here(
    name: str, device: str, provider: str | None, mpis: Mapping[str, str]
) -> tuple[str | None, str]:
    """Returns why a peer cannot be measured, ``None`` where it can, and the command that would add it."""
    if name.startswith(TORCH):
        return why_no_torch(name, device), ""
    here = "the CPU" if device == "cpu" else device
    if is_mpi4py(name):
        if device != "cpu":
            return f"serves tensors on cpu, and this measures tensors on {here}", ""
        return why_no_mpi4py(mpis.get(name.partition(":")[2])), INSTALL_MPI4PY
    backend, algorithm = split_name(name)
    spec = backend_spec(backend)
    chosen = spec.name == "nccl" and provider is not None
    reason = providers.unavailable(provider) if chosen else why_unavailable(spec.name)
    if reason is None:
        reason = why_not_on(device, spec)
    if reason is None and algorithm is not None and device != "cpu":
        reason = f"reduces tensors on the CPU, and this measures tensors on {here}"
    if reason is None and needs_mpirun(name):
        reason = why_no_mpi4py()
    return reason, spec.install
