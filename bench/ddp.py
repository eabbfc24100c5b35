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
possible. ``+diloco-50`` trains alone between outer steps, 50 steps apart, without a wrapper;
``+streaming-50`` exchanges fragments beside the training. ``+unused`` looks for unused parameters, ``+views``
has gradients lie in buckets, ``+static`` says that all iterations are alike.

``--hooks`` names hooks for all peers. What they do to the loss is told for models that learn something:
``digits`` and ``digits-resnet`` (a small convolutional network and a residual one on real images) and
``language`` (a transformer on texts of a Markov chain; needs transformers), each with the optimizer that it
learns with, others with SGD. With ``--machines`` each rank is on a network of its own, joined by a link of
the speed ``--link``:

    collectives bench ddp --models digits,language --hooks none,fp16,powersgd-1 --machines 2 --link 1gbit

An iteration is zero_grad, forward, loss, backward and the optimizer's step. Hooks with a state average
exactly in the warm-up. *sent* is what a rank sends in an iteration, counted from what its group does as the
best algorithms do it; *link* what the interface of a machine sends, headers included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default

import collectives
from collectives.bench.core.arguments import (
    Progress,
    add_files,
    add_options,
    at_least,
    option,
    parse_names,
    positive,
    run_measurement,
    silent,
)
from collectives.bench.core.devices import DEVICES, Device
from collectives.bench.core.namespaces import Machines
from collectives.bench.core.ranks import (
    Placement,
    PlacementOptions,
    SpinBarrier,
    rounds_of,
    share_of,
    split_lanes,
    why_no_group,
    without_collection,
)
from collectives.bench.core.records import (
    BaseReport,
    Chart,
    Samples,
    Skipped,
    Table,
    Timing,
    add_samples,
    check_known,
    curve_of,
    grouped,
    number_of_ranks,
    or_dash,
    usable,
)
from collectives.bench.models import (
    LEARNING_STEPS,
    TASKS,
    Data,
    Model,
    checksum,
    install_command,
    why_unavailable,
)
from collectives.bench.operations import OPERATIONS as MEASURED
from collectives.bench.operations import bus_factor
from collectives.bench.peers import why_no_torch
from collectives.cli.mpi_job import usual_ranks
from collectives.core.operations import OPERATIONS
from collectives.core.process_group import ProcessGroup
from collectives.ddp import DistributedDataParallel
from collectives.ddp.default_group import resolve_group
from collectives.ddp.hooks import debugging_hooks, default_hooks
from collectives.ddp.hooks.compression import (
    AdaptiveState,
    OneBitState,
    QuantizedAllreduceState,
    TopKState,
    adaptive_hook,
    one_bit_hook,
    quantized_allreduce_hook,
    top_k_hook,
)
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from collectives.ddp.hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from collectives.ddp.model_averaging import DiLoCoAverager
from collectives.ddp.optim import PostLocalSGDOptimizer
from collectives.ranks.processes import RankProcesses, commands

NOOP: Final = "noop"
"""The hook that communicates nothing."""


def _power(rank: int, hook: Any = powerSGD_hook) -> Callable[[Any, int], tuple[Any, Any]]:
    return lambda group, exact: (
        PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, exact)),
        hook,
    )


def _quantized(dtype: torch.dtype) -> Callable[[Any, int], tuple[Any, Any]]:
    return lambda group, exact: (QuantizedAllreduceState(group, exact, dtype), quantized_allreduce_hook)


HOOKS: Final[Mapping[str, Callable[[Any, int], tuple[Any, Any]]]] = {
    NOOP: lambda group, _: (group, debugging_hooks.noop_hook),
    "allreduce": lambda group, _: (group, default_hooks.allreduce_hook),
    "fp16": lambda group, _: (group, default_hooks.fp16_compress_hook),
    "bf16": lambda group, _: (group, default_hooks.bf16_compress_hook),
    "int8-tensor": lambda group, _: (group, quantization_pertensor_hook),
    "int8-block": lambda group, _: (group, quantization_perchannel_hook),
    "int8": _quantized(torch.int8),
    "float8": _quantized(torch.float8_e4m3fn),
    "powersgd-1": _power(1),
    "powersgd-2": _power(2),
    "powersgd-4": _power(4),
    "powersgd-4-fp16": _power(4, default_hooks.fp16_compress_wrapper(powerSGD_hook)),
    "powersgd-batched": _power(1, batched_powerSGD_hook),
    "one-bit": lambda group, exact: (OneBitState(group, exact), one_bit_hook),
    "top-k": lambda group, exact: (TopKState(group, 0.01, exact), top_k_hook),
    "adaptive": lambda group, exact: (AdaptiveState(group, start_iter=exact), adaptive_hook),
}
"""This package's: each makes state and hook of a group and the number of steps that are averaged exactly."""

AVERAGERS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{f"diloco-{period}": {"period": period} for period in (20, 50)},
    **{
        f"streaming-{period}": {"period": period, "fragments": 4, "delay": period // 10}
        for period in (20, 50)
    },
}
"""Options of a DiLoCoAverager that takes the place of the wrapper, by the word that stands for a hook."""

TORCH_HOOKS: Final[Mapping[str, Any]] = {
    NOOP: torch_debugging.noop_hook,
    "allreduce": torch_default.allreduce_hook,
    "fp16": torch_default.fp16_compress_hook,
    "bf16": torch_default.bf16_compress_hook,
}
"""torch's own that need no state."""


KINDS = ("ours", "torch", "alone")
"""Whose wrapper: this package's, torch's, none at all."""

OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}
"""Options of a peer, as arguments of its wrapper."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer.

    Attributes:
        kind: one of :data:`KINDS`.
        backend: name of the backend; empty of ``alone``.
        hook: name of a communication hook or of an averager; empty for none.
        options: names in :data:`OPTIONS`.
    """

    kind: str
    backend: str = ""
    hook: str = ""
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Peer:
        """Returns the peer of a name.

        Raises:
            ValueError: there is no such kind or option, or the name has another form.
        """
        head, *words = name.split("+")
        kind, colon, backend = head.partition(":")
        if kind not in KINDS or (kind == "alone") == bool(colon) or (kind != "alone" and not backend):
            raise ValueError(
                f"peer {name!r} must be alone, ours:BACKEND or torch:BACKEND, with +OPTION if wanted"
            )
        hooks: Mapping[str, Any] = {"ours": {**HOOKS, **AVERAGERS}, "torch": TORCH_HOOKS}.get(kind, {})
        known = [*hooks, *OPTIONS] if hooks else []
        if any(word not in known for word in words):
            raise ValueError(
                f"peer {name!r} has no known hook or option; {kind} knows "
                f"{', '.join(f'+{word}' for word in known) or 'none'}"
            )
        named = [word for word in words if word not in OPTIONS]
        if len(named) > 1 or len(set(words)) < len(words):
            raise ValueError(f"peer {name!r} has an option twice, or two hooks; a wrapper takes one")
        return cls(kind, backend, "".join(named), tuple(word for word in OPTIONS if word in words))

    def __str__(self) -> str:
        head = f"{self.kind}:{self.backend}" if self.backend else self.kind
        return "+".join(filter(None, (head, self.hook, *self.options)))

    @property
    def communicates(self) -> bool:
        """Whether the ranks' gradients are averaged."""
        return self.kind != "alone" and self.hook != NOOP

    @property
    def needs_mpi(self) -> bool:
        """Whether ``mpirun`` must start its ranks."""
        return self.kind == "ours" and "mpi" in self.backend.split(":")

    def wrap(self, model: nn.Module, group: Any, exact: int, bucket_cap_mb: float | None) -> nn.Module:
        """Returns a model in the peer's wrapper.

        Args:
            model: the model.
            group: of ours; torch's wrapper takes the default group.
            exact: first steps that a hook with a state averages exactly.
            bucket_cap_mb: of the wrapper.
        """
        if self.kind == "alone" or self.hook in AVERAGERS:
            return model
        ours = self.kind == "ours"
        wrapper: Any = DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
        arguments = {name: value for option in self.options for name, value in OPTIONS[option].items()}
        parallel: nn.Module = wrapper(model, bucket_cap_mb=bucket_cap_mb, **arguments)
        if self.hook:
            state, hook = HOOKS[self.hook](group, exact) if ours else (None, TORCH_HOOKS[self.hook])
            parallel.register_comm_hook(state, hook)  # type: ignore[operator]
        return parallel

    def averager(self, model: nn.Module, group: ProcessGroup | None) -> DiLoCoAverager | None:
        """Returns what averages the model's parameters beside its optimizer, if anything does.

        Args:
            model: the model.
            group: of ours.
        """
        if self.hook not in AVERAGERS:
            return None
        return DiLoCoAverager(model.parameters(), process_group=group, **AVERAGERS[self.hook])


BASELINE = Peer("torch", "gloo")
"""The peer that others are compared with: what users have without this package."""


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """One peer with one model.

    Attributes:
        peer: its name.
        model: name of the model.
        ranks: number of ranks.
        batch: samples of each rank in an iteration.
        length: of a sample: width and height of an image, tokens of a text, rows of a table.
        parameters: number of trained parameters.
        parameter_tensors: number of tensors they lie in.
        iteration: whole iterations.
        forward: clearing gradients, forward and loss.
        backward: backward, communication included.
        step: the optimizer's step.
        peak_memory_bytes: most memory of the device that any rank held at any time; on the CPU what was
            resident, shared memory included.
        start_memory_bytes: what that rank held before it built the model.
        communicates: whether the ranks' gradients are averaged.
        ranks_identical: whether all ranks ended with bitwise the same parameters; expected of a peer that
            communicates.
        grad_norm: norm of all gradients after the first iteration on rank 0; the same, but for rounding, for
            all peers that communicate the same.
        agrees: whether results are as they must be: see :attr:`ranks_identical` and :attr:`grad_norm`.
        sent_bytes: what a rank sends in an iteration, counted from what its group does as the best algorithms
            do it; ``None`` where the group does not count.
        link_bytes: what a machine's interface sends in one, headers included; ``None`` without machines.
        first_loss: mean over the ranks in the first step; ``None`` where the model learns nothing.
        final_loss: mean over the ranks in the last tenth of the steps, likewise.
        accuracy: part of the held-out samples that the model reads right in the end; ``None`` where there are
            none.
    """

    peer: str
    model: str
    ranks: int
    batch: int
    length: int
    parameters: int
    parameter_tensors: int
    iteration: Timing
    forward: Timing
    backward: Timing
    step: Timing
    peak_memory_bytes: int
    start_memory_bytes: int
    communicates: bool
    ranks_identical: bool
    grad_norm: float
    agrees: bool
    sent_bytes: float | None = None
    link_bytes: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    accuracy: float | None = None


class TrainingReport(BaseReport[TrainingRecord]):
    """All that the program found out."""

    SCHEMA = 2

    def record_as_json(self, record: TrainingRecord) -> dict[str, Any]:
        """Returns a record as plain values, with its ratios."""
        return {**asdict(record), "ratios": self.ratios(record)}

    def ratios(self, record: TrainingRecord) -> dict[str, float | None]:
        """Returns how a record compares with others of the same model; ``None`` where those are missing.

        ``time_over_noop``: its iteration over that of the same peer with a no-op hook, else of another one of
        the same wrapper with that hook, which uses no backend.
        ``time_over_plain``: over that of the same peer without hook and options.
        ``time_over_torch``: over that of torch's wrapper over Gloo with the same hook and options.
        ``memory_over_torch``: its peak of memory over the peak there.
        """
        peer = Peer.parse(record.peer)
        base = self._find(record, replace(peer, kind=BASELINE.kind, backend=BASELINE.backend))
        others = {
            "noop": self._without_communication(record, peer),
            "plain": self._find(record, replace(peer, hook="", options=())),
            "torch": base,
        }
        ratios: dict[str, float | None] = {
            f"time_over_{name}": record.iteration.median_us / other.iteration.median_us if other else None
            for name, other in others.items()
        }
        ratios["memory_over_torch"] = record.peak_memory_bytes / base.peak_memory_bytes if base else None
        return ratios

    def _runs(self) -> dict[tuple[str, int], list[TrainingRecord]]:
        """Returns the records by model and number of ranks."""
        return grouped(self.records, lambda record: (record.model, record.ranks))

    def charts(self) -> Sequence[Chart]:
        """Returns the iterations of all peers, for each model and number of ranks."""
        y = "iteration (ms), slowest rank, median and p10 to p90"
        return [
            Chart(
                f"{model}, {number_of_ranks(ranks)}",
                "",
                y,
                [curve_of("", [(record.peer, record.iteration)], 1e3) for record in records],
            )
            for (model, ranks), records in self._runs().items()
        ]

    def tables(self) -> Sequence[Table]:
        """Returns a table for each model and number of ranks, and one of what they send and learn."""
        tables = []
        for (model, ranks), records in self._runs().items():
            first = records[0]
            heading = (
                f"{model}: {first.parameters / 1e6:.1f} M parameters in {first.parameter_tensors} tensors, "
                f"batch {first.batch} (length {first.length}) on each of {number_of_ranks(ranks)}, "
                f"{first.iteration.calls} iterations; slowest rank, medians"
            )
            rows = [[record.peer, *_cells(self, record)] for record in records]
            tables.append(Table(heading, _COLUMNS, rows))
            hooks = {Peer.parse(record.peer).hook for record in records} - {"", NOOP}
            if hooks or any(record.final_loss is not None for record in records):
                heading = f"{model}, {number_of_ranks(ranks)}: sent by a rank in an iteration, and learned"
                tables.append(Table(heading, _LEARNED, [_learned(record) for record in records]))
        return tables

    def reading(self) -> Sequence[str]:
        """Returns what the ratios are of."""
        return (
            "/no-op: iteration over the same wrapper's with a no-op hook (what communication costs).",
            "/plain: over that of the same peer without hook and options (what these cost, or save).",
            f"/torch: over {BASELINE} with the same options; less than 1 is faster, or smaller.",
            "right: ranks agree bitwise, and gradients with the other peers'; - where none are sent.",
        )

    def _without_communication(self, record: TrainingRecord, peer: Peer) -> TrainingRecord | None:
        """Returns the record of a peer that does the same but for communication."""
        wanted = replace(peer, hook=NOOP)
        if peer == wanted or peer.kind == "alone":
            return None
        others = [wanted, *(Peer.parse(other.peer) for other in self.records)]
        alike = (other for other in others if replace(other, backend=wanted.backend) == wanted)
        return next((found for other in alike if (found := self._find(record, other)) is not None), None)

    def _find(self, like: TrainingRecord, peer: Peer) -> TrainingRecord | None:
        """Returns another record of the same model by its peer."""
        for record in self.records:
            if (record.peer, record.model, record.ranks) == (str(peer), like.model, like.ranks):
                return None if record is like else record
        return None


_COLUMNS = (
    "peer", "iteration\n(ms)", "mean\n(ms)", "p10\n(ms)", "p90\n(ms)", "min\n(ms)", "forward\n(ms)",
    "backward\n(ms)", "step\n(ms)", "/no-op\n(time)", "/plain\n(time)", "/torch\n(time)", "peak\n(MiB)",
    "/torch\n(memory)", "right",
)  # fmt: skip
_LEARNED = ("peer", "sent\n(MB)", "link\n(MB)", "loss\n(first)", "loss\n(last)", "accuracy")


def _learned(record: TrainingRecord) -> list[str]:
    in_mb = (None if value is None else value / 1e6 for value in (record.sent_bytes, record.link_bytes))
    return [
        record.peer,
        *(or_dash(value, ".3f") for value in in_mb),
        *(or_dash(value, ".4f") for value in (record.first_loss, record.final_loss)),
        or_dash(record.accuracy, ".3f"),
    ]


def _cells(report: TrainingReport, record: TrainingRecord) -> list[str]:
    ratios = report.ratios(record)
    whole = record.iteration
    times = [whole.median_us, whole.mean_us, whole.p10_us, whole.p90_us, whole.min_us]
    times += [timing.median_us for timing in (record.forward, record.backward, record.step)]
    return [
        *(f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.1f}" for us in times),
        *(or_dash(ratios[f"time_over_{other}"], ".3f") for other in ("noop", "plain", "torch")),
        f"{record.peak_memory_bytes / 2**20:.0f}",
        or_dash(ratios["memory_over_torch"], ".3f"),
        ("yes" if record.agrees else "NO") if record.communicates else "-",
    ]


_COLLECTIVE = {operation.name: operation.collective for operation in OPERATIONS}
"""The collective of each operation, of lists or of one tensor."""


@dataclass(slots=True)
class Facts:
    """A rank's first answer, after one iteration, and the last one, to the number zero.

    Attributes:
        parameters: number of trained parameters.
        parameter_tensors: number of tensors they lie in.
        grad_norm: norm of all gradients after the first iteration.
        start_memory_bytes: memory of the device that the rank held before the model was built.
        loss: of this rank in the first iteration.
        checksum: of all parameters in the end, bit for bit.
        peak_memory_bytes: most memory of the device that the rank held at any time.
        accuracy: part of the held-out samples that the model reads right; ``None`` where there are none.
    """

    parameters: int
    parameter_tensors: int
    grad_norm: float
    start_memory_bytes: int
    loss: float
    checksum: int = 0
    peak_memory_bytes: int = 0
    accuracy: float | None = None


PHASES = ("iteration", "forward", "backward", "step")


def train(
    rank: int,
    connection: Connection,
    placement: Placement,
    peer: Peer,
    name: str,
    batch: int,
    exact: int,
    bucket_cap_mb: float | None,
) -> None:
    """Body of a rank: sends :class:`Facts`, then samples for every number of iterations it gets.

    The number zero asks for :class:`Facts` again. Samples are the nanoseconds of each iteration, whole and by
    phase, this rank's ``loss``, and the bytes ``sent``: the least that a rank sends for what its group did,
    on the average of all ranks; none of a group that does not count it.

    Args:
        rank: the rank that this process is.
        connection: to the parent.
        placement: where it is.
        peer: the peer.
        name: of the model.
        batch: samples of each rank in an iteration.
        exact: first steps that a hook with a state averages exactly.
        bucket_cap_mb: of the wrapper.
    """
    placement.take(rank)
    task, size = TASKS[name], placement.size
    device = DEVICES[placement.device]
    torch.manual_seed(rank)  # every rank begins with other weights: the wrapper must bring them together
    data = task.data(batch, rank, size, device.kind)
    start_bytes = device.held_bytes()
    model = task.build().to(device.kind)
    optimizer = task.optimizer(model.parameters())
    group = None
    if peer.kind == "ours":
        placement.initialize(rank, peer.backend)
        group = resolve_group(None)
    elif peer.kind == "torch":
        placement.initialize_torch(rank, peer.backend)
    barrier = SpinBarrier(placement.memory, rank, size)
    parallel = peer.wrap(model, group, exact, bucket_cap_mb)
    averager = peer.averager(model, group)
    if averager is not None:
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    start = device.starting(barrier)

    def iterate(samples: Samples) -> None:
        compute = next(data.losses)
        before = _least_sent(group) if group is not None else 0.0
        start()
        marks = [device.mark()]
        model.zero_grad()
        loss = compute(parallel)
        marks.append(device.mark())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(device.mark())
        optimizer.step()
        marks.append(device.mark())
        for name, first, last in zip(PHASES, (0, 0, 1, 2), (3, 1, 2, 3), strict=True):
            samples[name].append(device.between_ns(marks[first], marks[last]))
        samples["loss"].append(loss.item())
        if group is not None:
            samples["sent"].append(_least_sent(group) - before)

    def run(iterations: int) -> Samples:
        samples: Samples = {name: [] for name in (*PHASES, "loss", "sent")}
        gc.collect()
        with without_collection():
            for _ in range(iterations):
                iterate(samples)
        return samples

    torch.manual_seed(200 + rank)  # the same dropout for all peers
    facts = _first_facts(model, start_bytes, run(1)["loss"][0])
    connection.send(facts)
    for iterations in commands(connection):
        if iterations:
            connection.send(run(iterations))
            continue
        connection.send(_last_facts(facts, model, averager, data, device))
    barrier.close()
    parallel = model  # the wrapper goes before its group
    if peer.kind != "alone":
        (torch_dist if group is None else collectives).destroy_process_group()


def _first_facts(model: nn.Module, start_bytes: int, loss: float) -> Facts:
    """Returns what there is to tell of a model after its first iteration."""
    tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [tensor.grad.double() for tensor in tensors if tensor.grad is not None]
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    return Facts(sum(tensor.numel() for tensor in tensors), len(tensors), norm, start_bytes, loss)


def _last_facts(
    facts: Facts, model: nn.Module, averager: DiLoCoAverager | None, data: Data, device: Device
) -> Facts:
    """Returns what there was to tell first, and what there is in the end."""
    if averager is not None:
        averager.finish()
    accuracy = None if data.accuracy is None else data.accuracy(model)
    most = device.most_held_bytes()
    return replace(facts, accuracy=accuracy, checksum=checksum(model), peak_memory_bytes=most)


def _least_sent(group: ProcessGroup) -> float:
    """Returns the bytes that a rank had to send so far, on the average of all ranks."""
    sent = 0.0
    for name, total in group.stats().items():
        collective = _COLLECTIVE.get(name, name)
        if collective in MEASURED:
            sent += total["bytes"] * (bus_factor(collective, group.size()) or 0.0)
    return sent


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


@dataclass(frozen=True, slots=True)
class Options(PlacementOptions):
    """What is measured.

    Attributes:
        models: names of models.
        peers: names of peers, as above.
        hooks: measure each peer (ours over host or nccl where none is named) with each of these
            communication hooks, and without one as ``none``.
        ranks: number of ranks.
        batch: samples of each rank in an iteration (where it is not named, each model's own).
        iterations: iterations of each peer that count (where it is not named, 5 to 200 as the budget allows,
            or what models that learn something need).
        warmup: how many come before, not timed (where it is not named, 3, or a tenth of what models that
            learn something need).
        budget_s: seconds that the iterations of each model should take.
        bucket_cap_mb: ``bucket_cap_mb`` of the wrappers.

    Raises:
        ValueError: a peer, a model, a hook or a device is not known, or there is none, or there are too few
            cores, or the machines do not fit the ranks, the peers or the device.
    """

    models: tuple[str, ...] | None = option(None, "--models", type=parse_names, metavar="NAME,...")
    peers: tuple[str, ...] | None = option(None, "--peers", type=parse_names, metavar="PEER,...")
    hooks: tuple[str, ...] | None = option(None, "--hooks", type=parse_names, metavar="NAME,...")
    ranks: int = option(2, "--nproc", type=at_least(1), default=usual_ranks, metavar="N")
    batch: int | None = option(None, "--batch", type=at_least(1), metavar="N")
    iterations: int | None = option(None, "--iters", type=at_least(1), metavar="N")
    warmup: int | None = option(None, "--warmup", type=at_least(2), metavar="N")
    budget_s: float = option(60.0, "--budget", type=positive, metavar="SECONDS")
    bucket_cap_mb: float | None = option(None, "--bucket-cap", type=float, metavar="MB")

    def __post_init__(self) -> None:
        self.check_placement(self.ranks)
        for peer in self.chosen_peers():
            if peer.kind == "ours":
                split_lanes(peer.backend)
            if self.machines > 1 and peer.needs_mpi:
                raise ValueError(
                    f"{peer} is started by mpirun, which knows nothing of machines in namespaces"
                )
        check_known("model", self.models or (), TASKS)

    def chosen_peers(self) -> list[Peer]:
        """Returns the peers, with their hooks."""
        names = self.peers or PEERS[self.device]
        if self.hooks is None:
            return [*dict.fromkeys(map(Peer.parse, names))]
        if self.peers is None:
            names = (DEFAULT_FOR_HOOKS[self.device],)
        hooked = (name if hook == NONE else f"{name}+{hook}" for name in names for hook in self.hooks)
        return [*dict.fromkeys(map(Peer.parse, hooked))]


class _Ranks:
    """The ranks of one peer.

    Args:
        peer: the peer.
        processes: the ranks, which first run one iteration; blocks until they have.
        machines: those that they are on, if any.
    """

    def __init__(self, peer: Peer, processes: RankProcesses, machines: Machines | None = None) -> None:
        self.peer = peer
        self.processes = processes
        self.facts: list[Facts] = processes.gather()
        self.samples: list[Samples] = [{} for _ in range(processes.size)]
        self.link_bytes = 0
        self._machines = machines

    def run(self, iterations: int, *, timed: bool = True) -> None:
        """Has the ranks run so many iterations and takes their times where ``timed``."""
        before = self._machines.sent_bytes(0) if self._machines else 0
        answers: list[Samples] = self.processes.ask(iterations)
        if timed:
            self.link_bytes += self._machines.sent_bytes(0) - before if self._machines else 0
            add_samples(self.samples, answers)

    def record(self, task: Model, batch: int, norms: Mapping[str, float]) -> TrainingRecord:
        """Returns what was found; the norms are those that peers must agree with, by hook."""
        peer, first = self.peer, self.facts[0]
        identical = len({facts.checksum for facts in self.facts}) == 1
        near = abs(first.grad_norm - norms[peer.hook]) <= TOLERANCE * norms[peer.hook]
        fattest = max(self.facts, key=lambda facts: facts.peak_memory_bytes)
        steps = len(self.samples[0]["loss"])
        last = [loss for one in self.samples for loss in one["loss"][-max(1, steps // LAST_SHARE) :]]
        sent = [count for one in self.samples for count in one["sent"]]
        return TrainingRecord(
            peer=str(peer),
            model=task.name,
            ranks=len(self.facts),
            batch=batch,
            length=task.length,
            parameters=first.parameters,
            parameter_tensors=first.parameter_tensors,
            peak_memory_bytes=fattest.peak_memory_bytes,
            start_memory_bytes=fattest.start_memory_bytes,
            communicates=peer.communicates,
            ranks_identical=identical,
            grad_norm=first.grad_norm,
            agrees=not peer.communicates or (identical and near),
            sent_bytes=statistics.fmean(sent) if sent else None,
            link_bytes=None if self._machines is None else self.link_bytes / steps,
            first_loss=statistics.fmean(facts.loss for facts in self.facts) if task.learns else None,
            final_loss=statistics.fmean(last) if task.learns else None,
            accuracy=first.accuracy,
            **{name: Timing.of([one[name] for one in self.samples]) for name in PHASES},
        )


def measure(options: Options, progress: Progress = silent) -> TrainingReport:
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
    report = TrainingReport("ddp", options.environment((options.ranks,)), asdict(options))
    models = _models(options, report.skipped)
    peers = _usable_peers(options, report.skipped)
    if not peers:
        return report
    with options.make_machines() as machines:
        for model in models:
            try:
                report.records += _measure_model(model, peers, options, machines, progress)
            except MemoryError as error:  # noqa: PERF203 - a model takes minutes
                if options.models is not None:
                    raise
                report.skipped.append(Skipped(model.name, str(error)))
    return report


def _models(options: Options, skipped: list[Skipped]) -> list[Model]:
    """Returns the models that can be built; the small one where none was named and no other can be."""

    def why_not(name: str) -> tuple[str | None, str]:
        package = TASKS[name].package
        return why_unavailable(package), install_command(package)

    names = usable(options.models or FIELD, why_not, skipped)
    return [TASKS[name] for name in names or (() if options.models else ("small",))]


def _usable_peers(options: Options, skipped: list[Skipped]) -> list[Peer]:
    def why_not(peer: Peer) -> tuple[str | None, str]:
        if peer.kind == "ours":
            return why_no_group(peer.backend, options.device)
        return why_no_torch(peer.backend, options.device) if peer.kind == "torch" else None, ""

    return usable(options.chosen_peers(), why_not, skipped)


def _measure_model(
    task: Model, peers: Sequence[Peer], options: Options, machines: Machines | None, say: Progress
) -> list[TrainingRecord]:
    """Measures all peers with one model; each round begins with another peer."""
    batch = options.batch or task.batch
    warmup = options.warmup or (LEARNING_WARMUP if task.learns else WARMUP)
    teams: list[_Ranks] = []
    with ExitStack() as stack:
        for peer in peers:
            say(f"{task.name}: starting {peer}")
            given = (peer, task.name, batch, max(2, warmup - 2), options.bucket_cap_mb)
            needed = ["mpi"] if peer.needs_mpi else []
            processes = options.start(train, options.ranks, *given, backends=needed, machines=machines)
            teams.append(_Ranks(peer, stack.enter_context(processes), machines))
            _check_memory(task, teams, len(peers), DEVICES[options.device])
        begin = time.monotonic()
        for ranks in teams:
            say(f"{task.name}: warming {ranks.peer} up")
            ranks.run(max(1, warmup - 1), timed=False)  # one more was run already
        each_s = (time.monotonic() - begin) / max(1, warmup - 1)
        possible = max(MIN_ITERATIONS, min(MAX_ITERATIONS, int(options.budget_s / each_s)))
        wanted = options.iterations or (LEARNING_STEPS - warmup if task.learns else possible)
        rounds = min(ROUNDS, wanted)
        for this, order in rounds_of(teams, rounds):
            say(f"{task.name}: round {this + 1} of {rounds}")
            for ranks in order:
                ranks.run(share_of(wanted, this, rounds))
        for ranks in teams:
            ranks.facts = ranks.processes.ask(0)
    return records_of(teams, task, batch)


def records_of(teams: Sequence[_Ranks], task: Model, batch: int) -> list[TrainingRecord]:
    """Returns a record for each peer; gradients must be those of the first peer with the same hook."""
    norms: dict[str, float] = {}
    for ranks in teams:
        norms.setdefault(ranks.peer.hook, ranks.facts[0].grad_norm)
    return [ranks.record(task, batch, norms) for ranks in teams]


def _check_memory(task: Model, teams: Sequence[_Ranks], wanted: int, device: Device) -> None:
    """Raises where the peers that are still to be started would not find the memory they need."""
    facts = teams[0].facts
    # Parameters, gradients and buckets, and what the optimizer or a rebuild of the buckets needs.
    needed = (wanted - len(teams)) * len(facts) * (BASE_BYTES + 5 * 4 * facts[0].parameters)
    available = len(facts) * device.memory_per_rank_bytes(len(facts))
    if needed > available:
        raise MemoryError(
            f"{wanted} peers with {task.name} need {needed / 2**30:.1f} GiB more memory, but "
            f"{available / 2**30:.1f} GiB are available; name fewer at once by --peers"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    add_options(
        parser,
        Options,
        models=f"{','.join(FIELD)}, or small without transformers; known are {','.join(TASKS)}",
        peers=f"{','.join(PEERS['cpu'])}; on cuda {','.join(PEERS['cuda'])}",
        hooks=f"those that peers name; known are {','.join([NONE, *HOOKS, *AVERAGERS])}",
    )
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where results are wrong or none exists.

    Raises:
        CommandError: the arguments do not fit together, memory is short, or a rank failed.
    """
    return run_measurement(Options, measure, lambda record: record.agrees, arguments)
