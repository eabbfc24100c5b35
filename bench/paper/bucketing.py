"""Why gradients are bucketed (figure 2): what small all-reduces cost, and when gradients are ready."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist

import collectives
from collectives.bench.comparison.torch_peer import PREFIX
from collectives.bench.paper.cells import Cell, Place, start
from collectives.bench.training.classifier import build_classifier, random_samples

__all__ = ["AllReduceSweep", "ReadyGradients"]

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

    @property
    def groups(self) -> tuple[str, ...]:
        """The one group."""
        return (self.backend,)

    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:
        """Returns the total times of this rank by parameters of each all-reduce, and how many were wrong.

        The sizes take turns. Every time is that from the first call until the last tensor is there.
        """
        torchs = self.backend.startswith(PREFIX)
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
                first = start(place)
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
        samples = random_samples(self.model, self.batch, self.length, 100, self.device)
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
            loss = samples.loss(model)
            begin = start(place)
            loss.backward()  # type: ignore[no-untyped-call]
            passes.append([device.between_ns(begin, mark) for mark in ready])
        sizes = [tensor.numel() for tensor in tensors]
        return {"ready_ns": passes[1:], "parameters": sum(sizes), "sizes": sizes}

    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the one rank's answer."""
        return dict(answers[0])
