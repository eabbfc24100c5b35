"""The parent's side of a comparison: starts ranks, has them time batches of calls, collects the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory

import torch

from collectives.bench.comparison import mpi4py_peer
from collectives.bench.comparison.mpi4py_peer import is_mpi4py
from collectives.bench.comparison.operations import ADD, OPERATIONS, ROOT, rounded_count
from collectives.bench.comparison.options import Options, available_backends
from collectives.bench.comparison.records import Record, Report
from collectives.bench.comparison.worker import LIMIT, Batch, BatchResult, Ready, Workload, run_worker
from collectives.bench.core.barrier import barrier_memory
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.groups import parent_store
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.namespaces import Machines
from collectives.bench.core.records import Skipped, Timing
from collectives.ranks.mpirun import Mpirun, find_mpirun, needs_mpirun, start_ranks, start_under_mpirun
from collectives.ranks.processes import RankProcesses
from collectives.secret import provided

__all__ = ["MAX_CALLS", "MIN_CALLS", "ROUNDS", "Point", "measure", "points_of"]

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
        # Nanoseconds by rank, then by call.
        self.cold: list[list[int]] = [[] for _ in range(processes.size)]
        self.hot: list[list[int]] = [[] for _ in range(processes.size)]
        self.loop: list[list[int]] = [[] for _ in range(processes.size)]
        self.host: list[list[int]] = [[] for _ in range(processes.size)]
        self.cold_wrong = 0
        self.hot_wrong = 0

    def run(self, calls: int, loop_calls: int = 0, *, timed: bool = True) -> list[BatchResult]:
        """Has the ranks run a batch and takes their results, the durations only where ``timed``."""
        batch = Batch(self.name, self.point.operation, self.point.count, calls, calls, loop_calls)
        results: list[BatchResult] = self.processes.ask(batch)
        self.cold_wrong += sum(result.cold_wrong for result in results) + _left_early(results)
        self.hot_wrong += sum(result.hot_wrong for result in results)
        if timed:
            for rank, result in enumerate(results):
                self.cold[rank] += result.cold_ns
                self.hot[rank] += result.hot_ns
                self.loop[rank] += result.loop_ns
                self.host[rank] += result.host_ns
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
    described = DEVICES[options.device].describe(options.ranks)
    environment = {**describe_machine(), **described, "peers": {}}
    report = Report(program, environment, asdict(options), skipped=skipped)
    if backends or options.limit:
        for ranks in options.ranks:
            with provided(), ExitStack() as stack:
                workload = options.workload(backends, ranks)
                started = _start(stack, ranks, workload, dict(options.mpis))
                _measure_points(report, started, workload, options, progress or _ignore, found or _ignore)
    return report


def _ignore(_: object) -> None:
    pass


def _start(
    stack: ExitStack, ranks: int, workload: Workload, mpis: Mapping[str, str]
) -> dict[str, RankProcesses]:
    """Returns the ranks that measure, by peer; the stack ends them."""
    own = replace(workload, backends=tuple(name for name in workload.backends if not is_mpi4py(name)))

    def mpirun_of(prefix: str | None) -> Mpirun:
        mpirun = find_mpirun(prefix)
        if mpirun is None:
            raise FileNotFoundError(f"there is no mpirun in {prefix or 'PATH'} any more")
        return mpirun if between is None else between(mpirun)

    between: Callable[[Mpirun], Mpirun] | None = None
    if own.machines > 1:
        machines = stack.enter_context(Machines(own.machines, own.link))
        own = replace(own, host=machines.host, namespaces=machines.namespaces_of(ranks))
        agent = machines.write_agent(stack.enter_context(TemporaryDirectory(prefix="collectives-")))
        addresses = [machines.address(machine) for machine in range(len(machines))]
        between = partial(Mpirun.between, machines=addresses, own=own.host, agent=agent, ranks=ranks)
    store = parent_store(own.host)
    stack.callback(store.close)
    started: dict[str, RankProcesses] = {}
    if own.backends or own.limit:
        args = (ranks, own, stack.enter_context(barrier_memory(ranks)), store.port)
        mpirun = mpirun_of(None) if any(map(needs_mpirun, own.backends)) else None
        processes = stack.enter_context(start_ranks(own.backends, ranks, run_worker, args, mpirun))
        started.update(dict.fromkeys((*own.backends, *((LIMIT,) if own.limit else ())), processes))
    for name in filter(is_mpi4py, workload.backends):
        other = replace(workload, backends=(name,), limit=False)
        memory = stack.enter_context(barrier_memory(ranks))
        mpirun, body = mpirun_of(mpis.get(name.partition(":")[2])), mpi4py_peer.run_worker
        started[name] = stack.enter_context(start_under_mpirun(ranks, body, (ranks, other, memory), mpirun))
    return started


def _measure_points(
    report: Report,
    started: Mapping[str, RankProcesses],
    workload: Workload,
    options: Options,
    progress: Progress,
    found: Found,
) -> None:
    """Measures all peers at all operations and sizes, and adds what it finds to the report."""
    teams = list(dict.fromkeys(started.values()))
    answers: list[Ready] = [processes.gather()[0] for processes in teams]
    ranks = teams[0].size
    refused = {what: why for ready in answers for what, why in ready.refused.items()}
    report.skipped += _skipped(refused, workload.operations, ranks)
    for ready in answers:
        report.environment["peers"].update(ready.versions)
    measuring = {name: started[name] for name in (*workload.backends, *((LIMIT,) if workload.limit else ()))}
    item_bytes = getattr(torch, workload.dtype).itemsize
    points = [
        point for name in workload.operations for point in points_of(name, options.sizes, item_bytes, ranks)
    ]
    end = time.monotonic() + options.budget_s
    for i, point in enumerate(points):
        what = f"{point.operation}, {ranks} ranks, {point.size_bytes} B"
        progress(f"{what} ({i + 1} of {len(points)} measurements)")
        peers = [
            _Peer(name, processes, point)
            for name, processes in measuring.items()
            if (name, point.operation) not in refused and not (name == LIMIT and point.operation == "barrier")
        ]
        left_s = max(0.0, end - time.monotonic()) / (len(points) - i)
        _measure(peers, options, left_s)
        records = [_record(ranks, workload, peer) for peer in peers]
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
    for this in range(ROUNDS if peers else 0):
        first = this % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            calls = peer.calls * (this + 1) // ROUNDS - peer.calls * this // ROUNDS
            if calls or peer.loop_calls:
                peer.run(calls, peer.loop_calls)
        enough = options.calls is None and all(len(peer.cold[0]) >= MIN_CALLS for peer in peers)
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


def _record(ranks: int, workload: Workload, peer: _Peer) -> Record:
    operation = ADD if peer.name == LIMIT else OPERATIONS[peer.point.operation]
    return Record(
        operation=operation.name,
        peer=peer.name,
        ranks=ranks,
        size_bytes=peer.point.size_bytes,
        count_elements=peer.point.count,
        dtype=workload.dtype,
        redop=workload.redop if operation.reduces else "none",
        in_place=operation.in_place and (workload.in_place or operation.name != "all_reduce"),
        cold=Timing.of(peer.cold),
        cold_wrong_elements=peer.cold_wrong,
        hot=Timing.of(peer.hot),
        hot_wrong_elements=peer.hot_wrong,
        loop=Timing.of(peer.loop) if peer.loop_calls else None,
        root=ROOT if operation.rooted else -1,
        compared_as=peer.point.operation,
        device=workload.device,
        host=Timing.of(peer.host) if peer.host[0] else None,
    )
