"""Cells: parts of figures that are measured in one go, kept when they are done, and not measured again.

They train models as classifiers, in wrappers that keep those of ranks equal.
"""

from __future__ import annotations

import gc
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.utils.data import TensorDataset

import collectives
from collectives.bench.core.devices import Device
from collectives.bench.core.ranks import rounds_of, without_collection
from collectives.bench.models import MODELS, batches, load_digits, residual_reader
from collectives.bench.peers import TORCH
from collectives.ddp import DistributedDataParallel
from collectives.ddp.model_averaging import average_parameters

CLASSES = 1000
"""Labels of a random sample, as many as those of ImageNet."""


class Classifier(nn.Module):
    """A model whose pooled output goes through one linear layer to the scores of :data:`CLASSES` classes.

    Args:
        body: the model; its output is the scores, or has them or what leads to them as ``pooler_output``.
        width: features of that pooled output; 0 where the body's output is the scores.
    """

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, CLASSES) if width else nn.Identity()

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Returns the scores of each sample."""
        output: Any = self.body(**inputs)
        pooled = getattr(output, "pooler_output", output)
        return torch.as_tensor(self.head(pooled.flatten(1)))


def build_classifier(name: str) -> nn.Module:
    """Returns a model of :data:`~collectives.bench.models.MODELS` as a classifier, untrained."""
    body = MODELS[name].build()
    config: Any = getattr(body, "config", None)
    if config is None:
        return Classifier(body, 0).train()
    sizes = getattr(config, "hidden_sizes", None)
    return Classifier(body, sizes[-1] if sizes else config.hidden_size).train()


def random_loss(
    name: str, batch: int, length: int, seed: int, device: str
) -> Callable[[nn.Module], torch.Tensor]:
    """Returns a function for the mean cross entropy of a classifier, wrapped or not, on random samples.

    Args:
        name: of the model.
        batch: number of samples.
        length: of each, see :class:`~collectives.bench.models.Model`.
        seed: of the random numbers.
        device: type of the device that the samples are moved to.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = MODELS[name].inputs(batch, length, generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
    given = {key: value.to(device) for key, value in inputs.items()}
    return lambda model: nn.functional.cross_entropy(model(**given), labels)


BUCKET_MB = 25.0
"""Size of a bucket where none is named: that of both wrappers."""


@dataclass(frozen=True)
class Wrapper:
    """A model that is kept equal on all ranks.

    Attributes:
        module: what forward goes through.
        no_sync: returns a context for an iteration whose gradients stay this rank's.
        after_backward: does what is still to be done with gradients; blocks until they are averaged.
        after_step: does what is to be done with parameters after the optimizer's step, likewise.
    """

    module: nn.Module
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    after_backward: Callable[[], object] = lambda: None
    after_step: Callable[[], object] = lambda: None


def wrap(name: str, model: nn.Module, group: Any, bucket_mb: float | None) -> Wrapper:
    """Returns a model in a wrapper.

    Those without overlap are the steps by which the paper (sections 2.2 and 3.2) comes to its design.

    Args:
        name: ``local`` communicates nothing; ``ours`` and ``torch`` are the wrappers; ``after backward`` has
            their buckets, but sends none before backward is over; ``per parameter`` averages one gradient
            after the other; ``averaging`` averages parameters.
        model: the model.
        group: of this package, of torch for its wrapper.
        bucket_mb: size of a bucket in MiB; 0 puts every gradient alone, ``None`` stands for 25.
    """
    if name == "local":
        return Wrapper(model)
    if name in {"ours", "torch"}:
        kind: Any = DistributedDataParallel if name == "ours" else nn.parallel.DistributedDataParallel
        parallel = kind(model, process_group=group, bucket_cap_mb=bucket_mb)
        return Wrapper(parallel, parallel.no_sync)
    first = collectives.get_process_group_ranks(group)[0]
    for tensor in (*model.parameters(), *model.buffers()):
        collectives.broadcast(tensor.detach(), first, group=group)
    if name == "averaging":
        return Wrapper(model, after_step=lambda: average_parameters(model.parameters(), group))

    def average() -> None:
        gradients = [one.grad for one in reversed([*model.parameters()]) if one.grad is not None]
        if name == "per parameter":
            for gradient in gradients:
                _average(gradient, group).wait()
        else:
            cap_mb = BUCKET_MB if bucket_mb is None else bucket_mb
            _average_in_buckets(gradients, group, cap_mb * (1 << 20))

    return Wrapper(model, after_backward=average)


def _average_in_buckets(gradients: Sequence[torch.Tensor], group: Any, cap_bytes: float) -> None:
    """Averages gradients in order, in buckets that are full at so many bytes; data types do not mix."""
    buckets: list[list[torch.Tensor]] = []
    size = cap_bytes
    for gradient in gradients:
        if size >= cap_bytes or gradient.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    flat = [torch.cat([gradient.reshape(-1) for gradient in bucket]) for bucket in buckets]
    works = [_average(tensor, group) for tensor in flat]
    for bucket, tensor, work in zip(buckets, flat, works, strict=True):
        work.wait()
        parts = torch.split(tensor, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _average(tensor: torch.Tensor, group: Any) -> Any:
    return collectives.all_reduce(tensor, op=collectives.ReduceOp.AVG, group=group, async_op=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank measures a cell.

    Attributes:
        rank: of this process among those that measure the cell.
        device: where tensors are.
        groups: the cell's groups by name; those of ``torch:NAME`` are torch's.
        own: a group of the cell's ranks that is none of these.
    """

    rank: int
    device: Device
    groups: Mapping[str, Any]
    own: Any

    def start(self) -> Any:
        """Returns the mark at which ranks begin together, with nothing under way on their devices."""
        self.device.starting(partial(collectives.barrier, self.own))()
        return self.device.mark()

    def agree(self, number: int) -> int:
        """Returns rank 0's number on all ranks of the cell."""
        told = torch.tensor([number])
        collectives.broadcast(told, 0, group=self.own)
        return int(told)


@dataclass(frozen=True)
class Cell(ABC):
    """What is measured in one go, by the same ranks.

    Attributes:
        panel: the part of the figure that it belongs to.
        ranks: number of ranks.
        device: type of the device.
    """

    panel: str
    ranks: int
    device: str

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that it needs, of all its ranks."""
        backend: str = getattr(self, "backend", "")
        return (backend,) if backend else ()

    @abstractmethod
    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:
        """Returns what one rank measured as plain values; called by all ranks of the cell.

        Args:
            place: where the rank is.
            budget_s: how long it should take, in seconds.
        """

    @abstractmethod
    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the samples to keep, of what :meth:`measure` returned on each rank."""

    def as_json(self) -> dict[str, Any]:
        """Returns kind and fields as plain values."""
        plain: dict[str, Any] = json.loads(json.dumps({"kind": type(self).__name__, **asdict(self)}))
        return plain


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell that is done.

    Attributes:
        cell: what :meth:`Cell.as_json` returned.
        samples: what :meth:`Cell.combine` returned.
    """

    cell: Mapping[str, Any]
    samples: Mapping[str, Any]


MIN_CALLS, MAX_CALLS = 3, 20
"""How often each total time is taken; the budget decides between the two. Likewise the passes of a model."""


@dataclass(frozen=True)
class AllReduceSweep(Cell):
    """Figures 2(a) and 2(b): the same parameters in more or fewer all-reduces, issued together.

    Attributes:
        backend: name of the group.
        parameters: float32 parameters in all.
        counts: parameters of each all-reduce.
    """

    backend: str
    parameters: int
    counts: tuple[int, ...]

    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:
        """Returns the total times of this rank by parameters of each all-reduce, and how many were wrong.

        The sizes take turns. Every time is that from the first call until the last tensor is there.
        """
        torchs = self.backend.startswith(TORCH)
        functions: Any = torch_dist if torchs else collectives
        group = place.groups[self.backend]
        memory = torch.ones(self.parameters, device=self.device)
        times: dict[int, list[int]] = {count: [] for count in self.counts}
        wrong = rounds = 0
        wanted = MAX_CALLS + 1
        end = time.monotonic() + budget_s
        while rounds < wanted:
            begin = time.monotonic()
            for count in self.counts:
                memory.fill_(1.0)
                parts = torch.split(memory, count)
                first = place.start()
                works = [functions.all_reduce(part, group=group, async_op=True) for part in parts]
                for work in works:
                    work.wait()
                took = place.device.between_ns(first, place.device.mark())
                wrong += int((memory != self.ranks).sum())
                if rounds:  # the first round warms up
                    times[count].append(took)
            rounds += 1
            possible = rounds + int((end - time.monotonic()) / (time.monotonic() - begin))
            wanted = place.agree(max(MIN_CALLS + 1, min(MAX_CALLS + 1, possible)))
        return {"wrong": wrong, "total_ns": [times[count] for count in self.counts]}

    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the slowest rank's times, and all wrong elements."""
        return {
            "wrong": sum(answer["wrong"] for answer in answers),
            "total_ns": [
                [max(ranks) for ranks in zip(*calls, strict=True)]
                for calls in zip(*(answer["total_ns"] for answer in answers), strict=True)
            ],
        }


@dataclass(frozen=True)
class ReadyGradients(Cell):
    """Figures 2(c) and 2(d): when the gradients of a model are ready, without any communication.

    Attributes:
        model: name of the model.
        batch: samples of a pass.
        length: of a sample.
    """

    model: str
    batch: int
    length: int

    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:
        """Returns the nanoseconds from the beginning of backward to each gradient, pass by pass."""
        torch.manual_seed(0)
        model = build_classifier(self.model).to(self.device)
        loss_of = random_loss(self.model, self.batch, self.length, 100, self.device)
        device = place.device
        ready: list[Any] = []
        tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in tensors:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: ready.append(device.mark())
            )
        passes: list[list[int]] = []
        end = time.monotonic() + budget_s
        while len(passes) < MIN_CALLS + 1 or (len(passes) <= MAX_CALLS and time.monotonic() < end):
            ready.clear()
            model.zero_grad()
            gc.collect()
            loss = loss_of(model)
            begin = place.start()
            loss.backward()  # type: ignore[no-untyped-call]
            passes.append([device.between_ns(begin, mark) for mark in ready])
        sizes = [tensor.numel() for tensor in tensors]
        return {"ready_ns": passes[1:], "parameters": sum(sizes), "sizes": sizes}

    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the one rank's answer."""
        return dict(answers[0])


PHASES = ("forward", "backward", "communication", "step")
"""What an iteration consists of: backward until the last gradient is there, communication what remains until
all are averaged, or parameters are."""

REBUILT_AFTER = 100
"""Iterations after which the wrapper and the samples are made anew (section 5.2)."""

MIN_ITERATIONS, MAX_ITERATIONS = 6, 400
"""Iterations of each series; the budget decides between the two."""

MIN_ROUNDS = 2
"""Turns of each series at least, so that noise of the machine meets all of them."""

WARMUP = 2

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Series:
    """One way to train.

    Attributes:
        name: what the figure calls it.
        group: name of the group; empty of a rank by itself.
        wrapper: name of the wrapper.
        bucket_mb: size of a bucket in MiB; ``None`` for the wrapper's default.
        interval: iterations from one synchronisation to the next.
    """

    name: str
    group: str
    wrapper: str
    bucket_mb: float | None = None
    interval: int = 1


@dataclass(frozen=True)
class Iterations(Cell):
    """Iterations of one model in several ways, which take turns.

    Attributes:
        model: name of the model.
        batch: samples of each rank in an iteration.
        length: of a sample.
        series: the ways.
    """

    model: str
    batch: int
    length: int
    series: tuple[Series, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """Those of all series."""
        return tuple(dict.fromkeys(series.group for series in self.series if series.group))

    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:
        """Returns, for each series, the nanoseconds of each iteration and its phases; and the sizes."""
        begin = time.monotonic()
        torch.manual_seed(place.rank)  # every rank begins with other weights: wrappers bring them together
        model = build_classifier(self.model).to(self.device)
        runs = [_Run(self, series, model, place) for series in self.series]
        for run in runs:
            run.span(WARMUP)
        each_s = (time.monotonic() - begin) / (WARMUP * len(runs))
        for run in runs:
            run.forget()
        left_s = budget_s - (time.monotonic() - begin)
        wanted = place.agree(max(MIN_ITERATIONS, min(MAX_ITERATIONS, int(left_s / (each_s * len(runs))))))
        rounds = max(MIN_ROUNDS, math.ceil(wanted / REBUILT_AFTER))
        longest = max(series.interval for series in self.series)
        each = math.ceil(wanted / rounds / longest) * longest  # so that all series synchronise equally often
        for _, order in rounds_of(runs, rounds):
            for run in order:
                run.span(each)
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        return {"sizes": sizes, "series": [run.times for run in runs]}

    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the slowest rank's times of each iteration, with the phases that it had."""
        series = []
        for parts in zip(*(answer["series"] for answer in answers), strict=True):
            ranks = np.argmax([part["iteration"] for part in parts], axis=0)
            whole = {
                name: [parts[rank][name][i] for i, rank in enumerate(ranks)]
                for name in ("iteration", *PHASES)
            }
            series.append({"rebuilt": parts[0]["rebuilt"], **whole})
        return {"sizes": answers[0]["sizes"], "series": series}


class _Run:
    """One series on one rank.

    Args:
        cell: the cell.
        series: the series.
        model: trained by all series in turn.
        place: where the rank is.
    """

    def __init__(self, cell: Iterations, series: Series, model: nn.Module, place: Place) -> None:
        self._cell = cell
        self._series = series
        self._model = model
        self._place = place
        self._seed = 0
        self._last: Any = None
        self.forget()

    def forget(self) -> None:
        """Begins anew with what is to be kept: times, and the iterations that include making the wrapper."""
        self.times: dict[str, list[int]] = {name: [] for name in ("rebuilt", "iteration", *PHASES)}

    def span(self, iterations: int) -> None:
        """Makes wrapper and samples, and runs so many iterations; called by all ranks."""
        gc.collect()
        optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self.times["rebuilt"].append(len(self.times["iteration"]))
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters()
        ]
        with without_collection():
            begin = self._place.start()
            self._seed += 1
            cell = self._cell
            loss_of = random_loss(
                cell.model, cell.batch, cell.length, 1000 * self._seed + self._place.rank, cell.device
            )
            group = self._place.groups.get(self._series.group)
            wrapper = wrap(self._series.wrapper, self._model, group, self._series.bucket_mb)
            for i in range(iterations):
                self._iterate(begin, wrapper, loss_of, optimizer, i)
                begin = self._place.start()
        for hook in hooks:
            hook.remove()

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._last = self._place.device.mark()

    def _iterate(self, begin: Any, wrapper: Wrapper, loss_of: Any, optimizer: Any, number: int) -> None:
        device, interval = self._place.device, self._series.interval
        synchronises = (number + 1) % interval == 0
        if number % interval == 0:
            optimizer.zero_grad()
        with nullcontext() if synchronises else wrapper.no_sync():
            loss = loss_of(wrapper.module)
            forward = device.mark()
            loss.backward()
        if synchronises:
            wrapper.after_backward()
        backward = device.mark()
        if synchronises:
            optimizer.step()
        stepped = device.mark()
        if synchronises:
            wrapper.after_step()
        end = device.mark()
        between = device.between_ns
        for name, took in (
            ("iteration", between(begin, end)),
            ("forward", between(begin, forward)),
            ("backward", between(forward, self._last)),
            ("communication", between(self._last, backward) + between(stepped, end)),
            ("step", between(backward, stepped)),
        ):
            self.times[name].append(took)


SIDES = (8, 64)
"""Least and most pixels of an image's side."""


@dataclass(frozen=True)
class Losses(Cell):
    """Training with one interval.

    Attributes:
        backend: name of the group.
        images: file of :func:`load_images`; empty for the digits of scikit-learn.
        batch: images of each rank in an iteration.
        lr: learning rate.
        interval: iterations from one synchronisation, and step of the optimizer, to the next.
        iterations: number of iterations.
    """

    backend: str
    images: str
    batch: int
    lr: float
    interval: int
    iterations: int

    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:  # noqa: ARG002
        """Returns this rank's loss at each iteration; gradients between two steps add up, as in the paper."""
        data = load_images(self.images) if self.images else load_digits().train
        images, labels = data.tensors
        torch.manual_seed(0)
        model = residual_reader().to(self.device)
        parallel = DistributedDataParallel(model, process_group=place.groups[self.backend])
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        shares = islice(batches(data, self.batch, place.rank, self.ranks), self.iterations)
        losses: list[float] = []
        for number, share in enumerate(shares, start=1):
            synchronises = number % self.interval == 0
            with nullcontext() if synchronises else parallel.no_sync():
                scores = parallel(images[share].to(self.device))
                loss = nn.functional.cross_entropy(scores, labels[share].to(self.device))
                loss.backward()  # type: ignore[no-untyped-call]
            if synchronises:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses}

    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the ranks' mean loss at each iteration."""
        return {"losses": np.mean([answer["losses"] for answer in answers], axis=0).tolist()}


def load_images(file: str) -> TensorDataset:
    """Returns the images and labels that a user has in a file, such as MNIST's ``mnist.npz``.

    Args:
        file: an archive of NumPy with ``x_train``, uint8 of shape ``[n, height, width]``, and ``y_train``, n
            labels of 0 to 9.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    with np.load(file, allow_pickle=False) as archive:
        missing = {"x_train", "y_train"} - set(archive.files)
        if missing:
            raise ValueError(f"{file} has no {' and no '.join(sorted(missing))}")
        images, labels = archive["x_train"], archive["y_train"]
    sides = images.shape[1:]
    if images.dtype != np.uint8 or images.ndim != 3 or min(sides) < SIDES[0] or max(sides) > SIDES[1]:
        raise ValueError(
            f"x_train of {file} must be uint8 of shape [n, height, width] with sides of {SIDES[0]} to "
            f"{SIDES[1]}, but is {images.dtype} of shape {list(images.shape)}"
        )
    whole = labels.shape == images.shape[:1] and labels.dtype.kind in "ui" and len(labels) > 0
    if not whole or labels.min() < 0 or labels.max() > 9:
        raise ValueError(
            f"y_train of {file} must be {len(images)} labels of 0 to 9, but is {labels.dtype} of shape "
            f"{list(labels.shape)}"
        )
    pixels = torch.from_numpy(images).float().div(255).unsqueeze(1)
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))
