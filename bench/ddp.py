"""How long does an iteration of data parallel training take, by model, wrapper and backend?

Every peer trains the same model on the same random data in processes of its own, with one thread on each
rank. Before every iteration the ranks leave a barrier together; each rank times it with its own clock, and
the slowest rank counts. Peers alternate in batches of a few iterations.

The default peers are the table that answers the question: both wrappers over every backend, and each without
communication. A model for which all of them need more memory than there is, is left out:

    collectives bench ddp --models bert-base --peers torch:gloo,torch:gloo+noop,ours:host,ours:host+noop

Peers are named KIND:BACKEND+OPTION: ``ours:host`` is this package's DistributedDataParallel over the host
backend, ``torch:gloo`` torch's over Gloo, ``torch:collectives`` torch's over this package's backend in
torch.distributed, ``alone`` the bare model. ``ours:round_robin:5`` goes through 5 groups in turn, of the
host backend or of a named one (``ours:round_robin:5:gloo``), ``torch:collectives_round_robin:3`` likewise
under torch's wrapper. ``+NAME`` is a communication hook; ``+noop`` communicates nothing: the best that is
possible. ``+unused`` looks for unused parameters; what that costs is best seen on a model of many tensors:

    collectives bench ddp --models layers500 --peers ours:host,ours:host+unused,torch:gloo,torch:gloo+unused

``--hooks`` names hooks for all peers. What they do to the loss is told for models that learn something:
``digits`` (a small convolutional network on real images) and ``language`` (a transformer on texts of a Markov
chain; needs transformers), each with the optimizer that it learns with. With ``--machines`` each rank is on a
network of its own, joined by a link of the speed ``--link``:

    collectives bench ddp --models digits,language --hooks none,fp16,powersgd-1 --machines 2 --link 1gbit

The model ``spare`` has a parameter that is not used, near the place where backward begins; beside ``small``
it tells what such a parameter costs of the overlap, in the column /no-op:

    collectives bench ddp --models small,spare --find-unused

An iteration is zero_grad, forward, loss, backward and the optimizer's step. Hooks with a state average
exactly in the warm-up. *sent* is what a rank sends in an iteration, counted from what its group does as the
best algorithms do it; *link* what the interface of a machine sends, headers included.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from collectives.bench.core.arguments import (
    add_files,
    add_iterations,
    add_machines,
    add_rank_options,
    add_ranks,
    at_least,
    conclude,
    failing_as_command,
    options_from,
    parse_names,
    show_progress,
)
from collectives.bench.core.barrier import barrier_memory
from collectives.bench.core.devices import DEVICES, Device, check_device, why_not_on
from collectives.bench.core.groups import LOCALHOST, lane_of, parent_store, split_lanes
from collectives.bench.core.machine import cores_of_ranks, describe_machine
from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError, check_machines
from collectives.bench.core.records import Skipped, Timing
from collectives.bench.training.ddp_peers import Peer
from collectives.bench.training.ddp_report import TrainingRecord, TrainingReport
from collectives.bench.training.ddp_worker import OPTIMIZERS, Assignment, End, Ready, Times, train
from collectives.bench.training.hooks import HOOKS
from collectives.bench.training.models import install_command, why_unavailable
from collectives.bench.training.tasks import LEARNING_STEPS, TASKS, Task
from collectives.ranks.mpirun import start_ranks
from collectives.ranks.processes import RankFailedError, RankProcesses
from collectives.registry.backends import backend_spec
from collectives.registry.backends import why_unavailable as why_no_backend
from collectives.secret import provided
from collectives.store import TCPStore

__all__ = ["Options", "add_arguments", "measure", "run"]

PEERS = {
    "cpu": (
        "torch:gloo", "torch:gloo+noop", "torch:collectives", "ours:host", "ours:host+noop", "ours:mpi",
        "ours:gloo", "ours:round_robin:3",
    ),
    "cuda": (
        "torch:nccl", "torch:nccl+noop", "torch:collectives", "ours:nccl", "ours:nccl+noop",
        "ours:round_robin:3:nccl",
    ),
}  # fmt: skip
"""By device both wrappers over all its backends, and each without communication."""

DEFAULT_FOR_HOOKS = {"cpu": "ours:host", "cuda": "ours:nccl"}
"""By device the peer that hooks are measured with where the user names none."""

NONE = "none"
"""What the command line calls averaging without a hook."""

FIELD = ("resnet50", "bert-base", "bert-mini")
"""Models where the user names none."""

ROUNDS = 8
"""Batches of iterations of each peer."""

MIN_ITERATIONS = 5
MAX_ITERATIONS = 200
"""Iterations of each peer where the user names no number; the budget decides between the two."""

WARMUP = 3
"""Iterations before those that count: wrappers lay their buckets out again after the first."""

LEARNING_WARMUP = LEARNING_STEPS // 10
"""The same of models that learn something, which hooks with a state are to begin with averages of."""

LAST_SHARE = 10
"""Part of the steps whose mean loss counts: the last one in so many."""

BASE_BYTES = 400 << 20
"""Memory of a rank beside the model: torch, transformers, activations."""

TOLERANCE = 1e-3
"""Largest relative difference of the gradients' norms between peers that communicate the same."""

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        models: names of tasks; ``None`` for all of the field, or the small one where they cannot be built.
        peers: names of peers; ``None`` for those of :data:`PEERS`, :data:`DEFAULT_FOR_HOOKS` with hooks.
        hooks: names of hooks that each of the peers is measured with, ``"none"`` for none; ``None`` for
            those that peers name.
        ranks: number of ranks.
        batch: samples of each rank in an iteration; ``None`` for each model's own number.
        tokens: length of a sample of text; ``None`` for each model's own.
        optimizer: name of the optimizer; empty for SGD, and the model's own where it learns something.
        iterations: iterations of each peer that count; ``None`` adapts to the budget, or is what models that
            learn something need.
        warmup: iterations before; ``None`` for 3, or a tenth of what models that learn something need.
        budget_s: seconds that the iterations of each model should take.
        bucket_cap_mb: size of a bucket; ``None`` for the wrappers' default.
        views: whether gradients are views of the buckets.
        find_unused: whether wrappers look for unused parameters.
        static: whether wrappers are promised a static graph.
        imports: modules that register further backends; imported here and on every rank.
        bind: whether each rank stays on a core of its own.
        device: type of the device that models and data are on.
        machines: number of network namespaces that play machines, with equal shares of the ranks; 1 for none.
        link: what each of them can send, in the units of ``tc``; ``None`` does not limit it.

    Raises:
        ValueError: a peer, a model, a hook or a device is not known, or there is none, or there are too few
            cores, or the machines do not fit the ranks, the peers or the device.
    """

    models: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None
    hooks: tuple[str, ...] | None = None
    ranks: int = 2
    batch: int | None = None
    tokens: int | None = None
    optimizer: str = ""
    iterations: int | None = None
    warmup: int | None = None
    budget_s: float = 60.0
    bucket_cap_mb: float | None = None
    views: bool = False
    find_unused: bool = False
    static: bool = False
    imports: tuple[str, ...] = ()
    bind: bool = False
    device: str = "cpu"
    machines: int = 1
    link: str | None = None

    def __post_init__(self) -> None:
        for module in self.imports:
            importlib.import_module(module)
        check_device(self.device)
        for peer in self.chosen_peers():
            if peer.kind == "ours":
                split_lanes(peer.backend)
            if self.machines > 1 and peer.needs_mpi:
                raise ValueError(
                    f"{peer} is started by mpirun, which knows nothing of machines in namespaces"
                )
        for name in self.models or ():
            if name not in TASKS:
                raise ValueError(f"unknown model {name!r}; known are {', '.join(TASKS)}")
        check_machines(self.ranks, self.machines, self.link)
        if self.machines > 1 and self.device != "cpu":
            raise ValueError(f"machines are played for tensors on the CPU, not on {self.device}")
        if self.bind:
            cores_of_ranks(self.ranks)

    def chosen_peers(self) -> list[Peer]:
        """Returns the peers, with their hooks."""
        names = self.peers or PEERS[self.device]
        if self.hooks is None:
            return [*dict.fromkeys(map(Peer.parse, names))]
        if self.peers is None:
            names = (DEFAULT_FOR_HOOKS[self.device],)
        hooked = ([name] if hook == NONE else [name, hook] for name in names for hook in self.hooks)
        return [*dict.fromkeys(Peer.parse("+".join(parts)) for parts in hooked)]

    def wrapper_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments that all wrappers get."""
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "gradient_as_bucket_view": self.views,
            "find_unused_parameters": self.find_unused,
            "static_graph": self.static,
        }


class _Ranks:
    """The ranks of one peer.

    Args:
        peer: the peer.
        processes: the ranks, which first run one iteration; blocks until they have.
        store: where they met; kept as long as they live.
        machines: those that they are on, if any.
    """

    def __init__(
        self, peer: Peer, processes: RankProcesses, store: TCPStore, machines: Machines | None = None
    ) -> None:
        self.peer = peer
        self.processes = processes
        self.store = store
        self.ready: list[Ready] = processes.gather()
        self.times = [Times() for _ in range(processes.size)]
        self.link_bytes: float | None = None if machines is None else 0.0
        self._machines = machines

    def run(self, iterations: int, *, timed: bool = True) -> None:
        """Has the ranks run so many iterations and takes their times where ``timed``."""
        before = self._machines.sent_bytes(0) if self._machines else 0
        answers: list[Times] = self.processes.ask(iterations)
        if not timed:
            return
        if self._machines is not None and self.link_bytes is not None:
            self.link_bytes += self._machines.sent_bytes(0) - before
        for mine, new in zip(self.times, answers, strict=True):
            for field in Times.__slots__:
                getattr(mine, field).extend(getattr(new, field))


def measure(options: Options, progress: Progress | None = None) -> TrainingReport:
    """Runs the measurement and returns its report; what cannot run here is in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
        MemoryError: there is too little memory for all peers of a model that was named at once; others are
            skipped.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    environment = {**describe_machine(), **DEVICES[options.device].describe((options.ranks,))}
    report = TrainingReport("ddp", environment, asdict(options))
    models = _models(options, report.skipped)
    peers = _usable_peers(options, report.skipped)
    with provided(), ExitStack() as stack:
        machines = None
        if options.machines > 1 and models and peers:
            machines = stack.enter_context(Machines(options.machines, options.link))
        for model in models if peers else ():
            try:
                report.records += _measure_model(model, peers, options, machines, progress)
            except MemoryError as error:  # noqa: PERF203 - a model takes minutes
                if options.models is not None:
                    raise
                report.skipped.append(Skipped(model.name, str(error)))
    return report


def _models(options: Options, skipped: list[Skipped]) -> list[Task]:
    """Returns the models that can be built; the small one where none was named and no other can be."""
    chosen = []
    for name in options.models or FIELD:
        reason = why_unavailable(TASKS[name].package)
        if reason is None:
            chosen.append(TASKS[name])
        else:
            skipped.append(Skipped(name, reason, install_command(TASKS[name].package)))
    if options.models is None and not chosen:
        chosen.append(TASKS["small"])
    return chosen


def _usable_peers(options: Options, skipped: list[Skipped]) -> list[Peer]:
    usable = []
    for peer in options.chosen_peers():
        backend = split_lanes(peer.backend)[0] if peer.kind == "ours" else ""
        reason = why_no_backend(backend) if backend else None
        if backend and reason is None:
            reason = why_not_on(options.device, lane_of(peer.backend))
        if reason is None:
            usable.append(peer)
        else:
            skipped.append(Skipped(str(peer), reason, backend_spec(backend).install))
    return usable


def _measure_model(
    task: Task,
    peers: Sequence[Peer],
    options: Options,
    machines: Machines | None,
    progress: Progress | None,
) -> list[TrainingRecord]:
    """Measures all peers with one model; each round begins with another peer."""
    say = progress or (lambda _: None)
    learns = task.optimizer is not None
    batch, length = options.batch or task.batch, options.tokens or task.length
    warmup = options.warmup or (LEARNING_WARMUP if learns else WARMUP)
    host = LOCALHOST if machines is None else machines.host
    started: list[_Ranks] = []
    with ExitStack() as stack:
        for peer in peers:
            say(f"{task.name}: starting {peer}")
            given = Assignment(
                peer,
                task.name,
                batch,
                length,
                options.optimizer or ("" if learns else "sgd"),
                max(2, warmup - 2),
                options.wrapper_arguments(),
                options.imports,
                cores_of_ranks(options.ranks) if options.bind else (),
                options.device,
                host,
                () if machines is None else machines.namespaces_of(options.ranks),
            )
            memory = stack.enter_context(barrier_memory(options.ranks))
            store = parent_store(host)
            needed = ["mpi"] if peer.needs_mpi else []
            arguments = (options.ranks, given, memory, store.port)
            processes = stack.enter_context(start_ranks(needed, options.ranks, train, arguments))
            started.append(_Ranks(peer, processes, store, machines))
            _check_memory(task, started, len(peers), DEVICES[options.device])
        _run_rounds(started, task, options, warmup, say)
        ends: list[list[End]] = [ranks.processes.ask(0) for ranks in started]
    norms = _agreed_norms(started)
    return [
        _record(ranks, task, (batch, length), end, norms) for ranks, end in zip(started, ends, strict=True)
    ]


def _check_memory(task: Task, started: Sequence[_Ranks], wanted: int, device: Device) -> None:
    """Raises where the peers that are still to be started would not find the memory they need."""
    ready = started[0].ready
    # Parameters, gradients and buckets, and what the optimizer or a rebuild of the buckets needs.
    needed = (wanted - len(started)) * len(ready) * (BASE_BYTES + 5 * 4 * ready[0].parameters)
    available = len(ready) * device.memory_per_rank_bytes(len(ready))
    if needed > available:
        raise MemoryError(
            f"{wanted} peers with {task.name} need {needed / 2**30:.1f} GiB more memory, but "
            f"{available / 2**30:.1f} GiB are available; name fewer at once by --peers"
        )


def _run_rounds(started: Sequence[_Ranks], task: Task, options: Options, warmup: int, say: Progress) -> None:
    begin = time.monotonic()
    for ranks in started:
        say(f"{task.name}: warming {ranks.peer} up")
        ranks.run(max(1, warmup - 1), timed=False)  # one more was run already
    each_s = (time.monotonic() - begin) / max(1, warmup - 1)
    wanted = options.iterations
    if wanted is None and task.optimizer is not None:
        wanted = LEARNING_STEPS - warmup
    if wanted is None:
        wanted = max(MIN_ITERATIONS, min(MAX_ITERATIONS, int(options.budget_s / each_s)))
    rounds = min(ROUNDS, wanted)
    for this in range(rounds):
        first = this % len(started)
        say(f"{task.name}: round {this + 1} of {rounds}")
        for ranks in [*started[first:], *started[:first]]:
            ranks.run(wanted * (this + 1) // rounds - wanted * this // rounds)


def _agreed_norms(started: Sequence[_Ranks]) -> Mapping[str, float]:
    """Returns, by hook, the gradients' norm that peers must agree with: the first peer's with that hook."""
    norms: dict[str, float] = {}
    for ranks in started:
        norms.setdefault(ranks.peer.hook, ranks.ready[0].grad_norm)
    return norms


def _record(
    ranks: _Ranks, task: Task, shape: tuple[int, int], ends: Sequence[End], norms: Mapping[str, float]
) -> TrainingRecord:
    peer, first = ranks.peer, ranks.ready[0]
    identical = len({end.checksum for end in ends}) == 1
    near = abs(first.grad_norm - norms[peer.hook]) <= TOLERANCE * norms[peer.hook]
    fattest = max(range(len(ends)), key=lambda rank: ends[rank].peak_memory_bytes)
    timing = {
        field: Timing.of([getattr(times, f"{field}_ns") for times in ranks.times])
        for field in ("iteration", "forward", "backward", "step")
    }
    steps = len(ranks.times[0].losses)
    last = [loss for times in ranks.times for loss in times.losses[-max(1, steps // LAST_SHARE) :]]
    sent = [count for times in ranks.times for count in times.sent_bytes]
    learns = task.optimizer is not None
    return TrainingRecord(
        peer=str(peer),
        model=task.name,
        ranks=ranks.processes.size,
        batch=shape[0],
        length=shape[1],
        parameters=first.parameters,
        parameter_tensors=first.parameter_tensors,
        peak_memory_bytes=ends[fattest].peak_memory_bytes,
        start_memory_bytes=ranks.ready[fattest].start_memory_bytes,
        communicates=peer.communicates,
        ranks_identical=identical,
        grad_norm=first.grad_norm,
        agrees=not peer.communicates or (identical and near),
        sent_bytes=statistics.fmean(sent) if sent else None,
        link_bytes=None if ranks.link_bytes is None else ranks.link_bytes / steps,
        first_loss=statistics.fmean(ready.loss for ready in ranks.ready) if learns else None,
        final_loss=statistics.fmean(last) if learns else None,
        accuracy=ends[0].accuracy,
        **timing,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--models",
        type=parse_names,
        metavar="NAME,...",
        help=f"of {', '.join(TASKS)} (default: {','.join(FIELD)}, or small without transformers)",
    )
    parser.add_argument(
        "--peers",
        type=parse_names,
        metavar="PEER,...",
        help=f"default: {','.join(PEERS['cpu'])}; on cuda {','.join(PEERS['cuda'])}",
    )
    parser.add_argument(
        "--hooks",
        type=parse_names,
        metavar="NAME,...",
        help=f"measure each peer ({DEFAULT_FOR_HOOKS['cpu']} where none is named) with each of these: "
        f"{', '.join([NONE, *HOOKS])}",
    )
    parser.add_argument(
        "--device",
        choices=tuple(DEVICES),
        default="cpu",
        help="where models and data are; on cuda, times are the stream's (default: %(default)s)",
    )
    add_ranks(parser)
    parser.add_argument(
        "--batch", type=at_least(1), metavar="N", help="samples of each rank (default: each model's own)"
    )
    parser.add_argument(
        "--tokens", type=at_least(1), metavar="N", help="length of a text (default: each model's own)"
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="",
        help="which, or none (default: sgd, and what models that learn something learn with)",
    )
    otherwise = f"{WARMUP}; {LEARNING_WARMUP} of models that learn something"
    add_iterations(parser, "iterations of each peer", None, otherwise)
    add_machines(parser)
    parser.add_argument(
        "--budget",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time that the iterations of each model should take (default: %(default)g)",
    )
    parser.add_argument("--bucket-cap", type=float, metavar="MB", help="bucket_cap_mb of the wrappers")
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view=True for all wrappers")
    parser.add_argument(
        "--find-unused", action="store_true", help="find_unused_parameters=True for all wrappers"
    )
    parser.add_argument("--static", action="store_true", help="static_graph=True for all wrappers")
    add_rank_options(parser)
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where results are wrong or none exists.

    Raises:
        CommandError: the arguments do not fit together, memory is short, or a rank failed.
    """
    renamed = {"ranks": "nproc", "iterations": "iters", "budget_s": "budget", "bucket_cap_mb": "bucket_cap"}
    options = options_from(Options, arguments, **renamed)
    with failing_as_command(RankFailedError, MemoryError, NamespacesUnavailableError):
        report = measure(options, show_progress)
    return conclude(report, lambda record: record.agrees, arguments)
