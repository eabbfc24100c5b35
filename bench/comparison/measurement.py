"""The parent's side of a comparison: starts ranks, has them time batches of calls, collects the results."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory

import torch

from collectives.backends.nccl import providers
from collectives.bench.comparison import mpi4py_peer, torch_peer
from collectives.bench.comparison.goals import parse_goal
from collectives.bench.comparison.mpi4py_peer import MPI4PY, is_mpi4py
from collectives.bench.comparison.operations import ADD, OPERATIONS, ROOT, rounded_count
from collectives.bench.comparison.peers import split_name
from collectives.bench.comparison.records import Record, Report
from collectives.bench.comparison.worker import (
    LIMIT,
    Batch,
    BatchResult,
    Ready,
    Workload,
    memory_bytes,
    run_worker,
)
from collectives.bench.core.barrier import barrier_memory
from collectives.bench.core.devices import DEVICES, check_device, why_not_on
from collectives.bench.core.groups import parent_store
from collectives.bench.core.machine import cores_of_ranks, describe_machine
from collectives.bench.core.namespaces import Machines, check_machines
from collectives.bench.core.records import Skipped, Timing
from collectives.bench.core.text import format_bytes, parse_sizes
from collectives.ranks.mpirun import Mpirun, find_mpirun, needs_mpirun, start_ranks, start_under_mpirun
from collectives.ranks.processes import RankProcesses
from collectives.registry.backends import backend_names, backend_spec, why_unavailable
from collectives.secret import provided

__all__ = [
    "DTYPES",
    "MAX_CALLS",
    "MIN_CALLS",
    "ROUNDS",
    "Options",
    "Point",
    "available_backends",
    "measure",
    "points_of",
]

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
        goals: what is asked of the times, as :mod:`collectives.bench.comparison.goals` reads it.
        machines: number of network namespaces that play machines, with equal shares of the ranks; 1 for
            none.
        link: what each of them can send, in the units of ``tc``; ``None`` does not limit it.
        device: type of the device that the tensors are on, a name of
            :data:`~collectives.bench.core.devices.DEVICES`.
        provider: package that loads NCCL for the nccl backend; ``None`` leaves it to the environment.
        mpis: further installations of MPI, each a peer ``mpi4py:NAME``: names and folders with ``bin`` and
            ``lib``.

    Raises:
        ValueError: a backend, an MPI or an operation is not known, a goal cannot be read, a size is no
            multiple of the element's, there is no such device or provider, too little memory or too few
            cores, or the machines do not fit the ranks or the device.
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
    mpis: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for module in self.imports:
            importlib.import_module(module)
        self._check_backends()
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

    def _check_backends(self) -> None:
        for name in self.backends or ():
            if _is_own_backend(name):
                backend_spec(split_name(name)[0])
            elif is_mpi4py(name) and name not in {MPI4PY, *(f"{MPI4PY}:{mpi}" for mpi, _ in self.mpis)}:
                raise ValueError(f"{name} names an MPI without a folder; say where it is (--mpi)")

    def _check_machines(self) -> None:
        for ranks in self.ranks:
            check_machines(ranks, self.machines, self.link)
        if self.machines > 1 and self.device != "cpu":
            raise ValueError(f"machines are played for tensors on the CPU, not on {self.device}")

    def _check_device(self) -> None:
        check_device(self.device)
        if self.provider is not None and self.provider not in providers.PROVIDERS:
            raise ValueError(
                f"unknown provider {self.provider!r} of NCCL; known are {', '.join(providers.PROVIDERS)}"
            )
        if self.provider is not None and self.device == "cpu":
            raise ValueError("a provider of NCCL serves tensors on cuda; ask for that device")

    def workload(self, backends: Sequence[str], ranks: int) -> Workload:
        """Returns what ranks are told to measure.

        Args:
            backends: the peers, by name.
            ranks: number of ranks.
        """
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
        first, other = {"cpu": ("host", MPI4PY), "cuda": ("nccl", torch_peer.NCCL)}[device]
        names = [*sorted(backend_names(), key=lambda name: (name != first, name)), other]
        names += [f"{MPI4PY}:{name}" for name in mpis] if device == "cpu" else []
    available: list[str] = []
    skipped: list[Skipped] = []
    for name in dict.fromkeys(names):
        peer = _full_name(name) if _is_own_backend(name) else name
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
    if name.startswith(torch_peer.PREFIX):
        return torch_peer.why_unavailable(name, device), ""
    here = "the CPU" if device == "cpu" else device
    if is_mpi4py(name):
        if device != "cpu":
            return f"serves tensors on cpu, and this measures tensors on {here}", ""
        return mpi4py_peer.why_unavailable(mpis.get(name.partition(":")[2])), mpi4py_peer.INSTALL
    backend, algorithm = split_name(name)
    spec = backend_spec(backend)
    chosen = spec.name == "nccl" and provider is not None
    reason = providers.unavailable(provider) if chosen else why_unavailable(spec.name)
    if reason is None:
        reason = why_not_on(device, spec)
    if reason is None and algorithm is not None and device != "cpu":
        reason = f"reduces tensors on the CPU, and this measures tensors on {here}"
    if reason is None and needs_mpirun(name):
        reason = mpi4py_peer.why_unavailable()
    return reason, spec.install


def _is_own_backend(name: str) -> bool:
    """Returns whether a peer's name is that of a backend of ours, or of an algorithm over it."""
    return not is_mpi4py(name) and not name.startswith(torch_peer.PREFIX)
