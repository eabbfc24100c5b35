"""Iterations of training, in phases (figures 6 to 10 and 12): labels, classifier, cross entropy and SGD."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collectives.bench.paper.cells import Cell, Place, slowest, start
from collectives.bench.training.classifier import build_classifier, random_samples
from collectives.bench.training.wrappers import WRAPPERS, Wrapper

__all__ = ["PHASES", "Iterations", "Series"]

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
        for this in range(rounds):
            first = this % len(runs)
            for run in [*runs[first:], *runs[:first]]:
                run.span(each)
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        return {"sizes": sizes, "series": [run.answer() for run in runs]}

    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the slowest rank's times of each iteration, with the phases that it had."""
        series = []
        for parts in zip(*(answer["series"] for answer in answers), strict=True):
            ranks = slowest([part["iteration"] for part in parts])
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
        """Begins anew with what is to be kept."""
        self._times: dict[str, list[int]] = {name: [] for name in ("iteration", *PHASES)}
        self._rebuilt: list[int] = []

    def answer(self) -> dict[str, Any]:
        """Returns all times, and at which iterations the wrapper was made; those include that."""
        return {"rebuilt": self._rebuilt, **self._times}

    def span(self, iterations: int) -> None:
        """Makes wrapper and samples, and runs so many iterations; called by all ranks."""
        gc.collect()
        optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._rebuilt.append(len(self._times["iteration"]))
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters()
        ]
        gc.disable()
        try:
            begin = start(self._place)
            self._seed += 1
            cell = self._cell
            samples = random_samples(
                cell.model, cell.batch, cell.length, 1000 * self._seed + self._place.rank, cell.device
            )
            group = self._place.groups.get(self._series.group)
            wrapper = WRAPPERS[self._series.wrapper](self._model, group, self._series.bucket_mb)
            for i in range(iterations):
                self._iterate(begin, wrapper, samples, optimizer, i)
                begin = start(self._place)
        finally:
            gc.enable()
            for hook in hooks:
                hook.remove()

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._last = self._place.device.mark()

    def _iterate(self, begin: Any, wrapper: Wrapper, samples: Any, optimizer: Any, number: int) -> None:
        device, interval = self._place.device, self._series.interval
        synchronises = (number + 1) % interval == 0
        if number % interval == 0:
            optimizer.zero_grad()
        with nullcontext() if synchronises else wrapper.no_sync():
            loss = samples.loss(wrapper.module)
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
            self._times[name].append(took)
