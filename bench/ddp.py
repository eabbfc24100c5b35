"""How long does an iteration of data parallel training take, by model, wrapper and backend?

Every peer trains the same model on the same random data in processes of its own; peers take turns within one
run. The ranks leave a barrier of the bench's own together before every iteration, each takes its durations
with its own clock, and the slowest rank's count. One thread on each rank.

Peers are named KIND:BACKEND+HOOK: ``ours:host`` is this package's DistributedDataParallel over the host
backend, ``torch:gloo`` torch's over Gloo, ``torch:collectives`` torch's over this package's backend in
torch.distributed, ``alone`` the bare model. Hooks: ``+noop`` (no communication: the best that is possible),
``+fp16``, ``+bf16``.

An iteration is zero_grad, forward, loss, backward and the optimizer's step.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.bench.comparison import at_least, parse_names, show_progress
from collectives.bench.groups import parent_store
from collectives.bench.lockstep import create_board
from collectives.bench.machine import describe_machine, memory_available_bytes, usable_cores
from collectives.bench.models import MODELS, Model, install_command, why_unavailable
from collectives.bench.ranks import RankFailedError, SpawnedTeam, Team
from collectives.bench.records import Skipped, Timing, write_json
from collectives.bench.table import header_lines
from collectives.bench.trainer import OPTIMIZERS, Assignment, End, Ready, Times, parse_peer, train
from collectives.bench.training_records import TrainingRecord, TrainingReport, report_lines
from collectives.cli import CommandError
from collectives.registry import backend_spec
from collectives.registry import why_unavailable as why_no_backend
from collectives.store import TCPStore

__all__ = ["Options", "add_arguments", "measure", "run"]

PEERS = ("ours:host", "ours:host+noop", "torch:gloo", "torch:gloo+noop", "torch:collectives")

ROUNDS = 8
"""Turns of each peer."""

MIN_ITERATIONS = 5
MAX_ITERATIONS = 200
"""Iterations of each peer where the user names no number; the budget decides between the two."""

WARMUP = 3
"""Iterations before those that count: wrappers lay their buckets out again after the first."""

BASE_BYTES = 400 << 20
"""Memory of a rank beside the model: torch, transformers, activations."""

TOLERANCE = 1e-3
"""Largest relative difference of the gradients' norms between peers that communicate the same."""

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        models: names of models; ``None`` for all of the field, or the small one where they cannot be built.
        peers: names of peers.
        ranks: number of ranks.
        batch: samples of each rank in an iteration; ``None`` for each model's own number.
        tokens: length of a sample of text; ``None`` for each model's own.
        optimizer: name of the optimizer.
        iterations: iterations of each peer that count; ``None`` adapts to the budget.
        warmup: iterations before.
        budget_s: seconds that the iterations of each model should take.
        bucket_cap_mb: size of a bucket; ``None`` for the wrappers' default.
        views: whether gradients are views of the buckets.
        find_unused: whether wrappers look for unused parameters.
        static: whether wrappers are promised a static graph.
        imports: modules that register further backends; imported here and on every rank.
        bind: whether each rank stays on a core of its own.

    Raises:
        ValueError: a peer or a model is not known, or there are too few cores.
    """

    models: tuple[str, ...] | None = None
    peers: tuple[str, ...] = PEERS
    ranks: int = 2
    batch: int | None = None
    tokens: int | None = None
    optimizer: str = "sgd"
    iterations: int | None = None
    warmup: int = WARMUP
    budget_s: float = 60.0
    bucket_cap_mb: float | None = None
    views: bool = False
    find_unused: bool = False
    static: bool = False
    imports: tuple[str, ...] = ()
    bind: bool = False

    def __post_init__(self) -> None:
        for module in self.imports:
            importlib.import_module(module)
        for peer in self.peers:
            kind, backend, _ = parse_peer(peer)
            if kind == "ours":
                backend_spec(backend)
        for name in self.models or ():
            if name not in MODELS:
                raise ValueError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
        if self.bind and self.ranks > usable_cores():
            raise ValueError(
                f"{self.ranks} ranks cannot have a core each: {usable_cores()} can be used; do not bind"
            )

    def wrapper_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments that all wrappers get."""
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "gradient_as_bucket_view": self.views,
            "find_unused_parameters": self.find_unused,
            "static_graph": self.static,
        }


class _Peer:
    """One peer with its ranks.

    Args:
        name: its name.
        team: the ranks, which first run one iteration; blocks until they have.
        store: where they met; kept as long as they live.
    """

    def __init__(self, name: str, team: Team, store: TCPStore) -> None:
        self.name = name
        self.team = team
        self.store = store
        self.ready: list[Ready] = team.gather()
        self.times = [Times([], [], [], []) for _ in range(team.size)]

    def run(self, iterations: int, *, timed: bool = True) -> None:
        """Has the ranks run so many iterations and takes their times where ``timed``."""
        for mine, new in zip(self.times, self.team.ask(iterations), strict=True):
            if timed:
                for field in Times.__slots__:
                    getattr(mine, field).extend(getattr(new, field))


def measure(options: Options, progress: Progress | None = None) -> TrainingReport:
    """Runs the measurement and returns its report; what cannot run here is in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
        MemoryError: there is too little memory for all peers of a model at once.
    """
    report = TrainingReport("ddp", describe_machine(), asdict(options))
    models = _models(options, report.skipped)
    peers = _usable_peers(options, report.skipped)
    for model in models if peers else ():
        report.records += _measure_model(model, peers, options, progress)
    return report


def _models(options: Options, skipped: list[Skipped]) -> list[Model]:
    """Returns the models that can be built; the small one where none was named and no other can be."""
    names = options.models or tuple(name for name, model in MODELS.items() if model.package)
    chosen = []
    for name in names:
        reason = why_unavailable(MODELS[name])
        if reason is None:
            chosen.append(MODELS[name])
        else:
            skipped.append(Skipped(name, reason, install_command(MODELS[name])))
    if options.models is None and not chosen:
        chosen.append(MODELS["small"])
    return chosen


def _usable_peers(options: Options, skipped: list[Skipped]) -> list[str]:
    usable = []
    for peer in dict.fromkeys(options.peers):
        kind, backend, _ = parse_peer(peer)
        reason = why_no_backend(backend) if kind == "ours" else None
        if reason is None:
            usable.append(peer)
        else:
            skipped.append(Skipped(peer, reason, backend_spec(backend).install))
    return usable


def _measure_model(
    model: Model, names: Sequence[str], options: Options, progress: Progress | None
) -> list[TrainingRecord]:
    """Measures all peers with one model; each round begins with another peer."""
    say = progress or (lambda _: None)
    batch, length = options.batch or model.batch, options.tokens or model.length
    peers: list[_Peer] = []
    with ExitStack() as stack:
        for name in names:
            say(f"{model.name}: starting {name}")
            given = Assignment(
                name,
                model.name,
                batch,
                length,
                options.optimizer,
                options.wrapper_arguments(),
                options.imports,
                options.bind,
            )
            descriptor, board = create_board(options.ranks)
            stack.callback(os.close, descriptor)
            store = parent_store()
            team = SpawnedTeam(options.ranks, train, (options.ranks, given, board, store.port))
            peers.append(_Peer(name, stack.enter_context(team), store))
            _check_memory(model, peers, names)
        _play(peers, model, options, say)
        ends: dict[str, list[End]] = {peer.name: peer.team.ask(0) for peer in peers}
    norms = _agreed_norms(peers)
    return [_record(peer, model, (batch, length), ends[peer.name], norms) for peer in peers]


def _check_memory(model: Model, peers: Sequence[_Peer], names: Sequence[str]) -> None:
    """Raises where the peers that are still to be started would not find the memory they need."""
    ready = peers[0].ready
    # Parameters, gradients and buckets, and what the optimizer or a rebuild of the buckets needs.
    needed = (len(names) - len(peers)) * len(ready) * (BASE_BYTES + 5 * 4 * ready[0].parameters)
    available = memory_available_bytes()
    if needed > available:
        raise MemoryError(
            f"{len(names)} peers with {model.name} need {needed / 2**30:.1f} GiB more memory, but "
            f"{available / 2**30:.1f} GiB are available; name fewer at once by --peers"
        )


def _play(peers: Sequence[_Peer], model: Model, options: Options, say: Progress) -> None:
    begin = time.monotonic()
    for peer in peers:
        say(f"{model.name}: warming {peer.name} up")
        peer.run(max(1, options.warmup - 1), timed=False)  # one more was run already
    each_s = (time.monotonic() - begin) / max(1, options.warmup - 1)
    wanted = options.iterations
    if wanted is None:
        wanted = max(MIN_ITERATIONS, min(MAX_ITERATIONS, int(options.budget_s / each_s)))
    rounds = min(ROUNDS, wanted)
    for this in range(rounds):
        first = this % len(peers)
        say(f"{model.name}: round {this + 1} of {rounds}")
        for peer in [*peers[first:], *peers[:first]]:
            peer.run(wanted * (this + 1) // rounds - wanted * this // rounds)


def _agreed_norms(peers: Sequence[_Peer]) -> Mapping[str, float]:
    """Returns, by hook, the gradients' norm that peers must agree with: the first peer's with that hook."""
    norms: dict[str, float] = {}
    for peer in peers:
        norms.setdefault(parse_peer(peer.name)[2], peer.ready[0].grad_norm)
    return norms


def _record(
    peer: _Peer, model: Model, shape: tuple[int, int], ends: Sequence[End], norms: Mapping[str, float]
) -> TrainingRecord:
    kind, _, hook = parse_peer(peer.name)
    first = peer.ready[0]
    communicates = kind != "alone" and hook != "noop"
    identical = len({end.checksum for end in ends}) == 1
    near = abs(first.grad_norm - norms[hook]) <= TOLERANCE * norms[hook]
    fattest = max(range(len(ends)), key=lambda rank: ends[rank].peak_memory_bytes)
    timing = {
        field: Timing.of([getattr(times, f"{field}_ns") for times in peer.times])
        for field in ("iteration", "forward", "backward", "step")
    }
    return TrainingRecord(
        peer=peer.name,
        model=model.name,
        ranks=peer.team.size,
        batch=shape[0],
        length=shape[1],
        parameters=first.parameters,
        parameter_tensors=first.parameter_tensors,
        peak_memory_bytes=ends[fattest].peak_memory_bytes,
        start_memory_bytes=peer.ready[fattest].start_memory_bytes,
        communicates=communicates,
        ranks_identical=identical,
        grad_norm=first.grad_norm,
        agrees=not communicates or (identical and near),
        **timing,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--models",
        type=parse_names,
        metavar="NAME,...",
        help=f"of {', '.join(MODELS)} (default: all but small, or small where transformers is missing)",
    )
    parser.add_argument(
        "--peers", type=parse_names, default=PEERS, metavar="PEER,...", help=f"default: {','.join(PEERS)}"
    )
    parser.add_argument("--nproc", type=at_least(1), default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument(
        "--batch", type=at_least(1), metavar="N", help="samples of each rank (default: each model's own)"
    )
    parser.add_argument(
        "--tokens", type=at_least(1), metavar="N", help="length of a text (default: each model's own)"
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="which, or none (default: %(default)s)"
    )
    parser.add_argument(
        "--iters",
        type=at_least(1),
        metavar="N",
        help="iterations of each peer (default: 5 to 200, as the budget allows)",
    )
    parser.add_argument(
        "--warmup",
        type=at_least(2),
        default=WARMUP,
        metavar="N",
        help="iterations before, not timed (default: %(default)s)",
    )
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where results are wrong or none exists.

    Raises:
        CommandError: the arguments do not fit together, memory is short, or a rank failed.
    """
    try:
        options = Options(
            models=arguments.models,
            peers=arguments.peers,
            ranks=arguments.nproc,
            batch=arguments.batch,
            tokens=arguments.tokens,
            optimizer=arguments.optimizer,
            iterations=arguments.iters,
            warmup=arguments.warmup,
            budget_s=arguments.budget,
            bucket_cap_mb=arguments.bucket_cap,
            views=arguments.views,
            find_unused=arguments.find_unused,
            static=arguments.static,
            imports=arguments.imports,
            bind=arguments.bind,
        )
    except ValueError as error:
        raise CommandError(str(error)) from None
    try:
        report = measure(options, show_progress)
    except (RankFailedError, MemoryError) as error:
        raise CommandError(str(error)) from error
    finally:
        show_progress("")
    print("\n".join([*header_lines(report), *report_lines(report)]))
    if arguments.json is not None:
        write_json(arguments.json, report.as_json())
    return 1 if not report.records or not all(record.agrees for record in report.records) else 0
