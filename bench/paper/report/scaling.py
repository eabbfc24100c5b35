"""Judges of figures 9, 10 and 12: more ranks, skipped synchronisations, groups in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from collectives.bench.paper.cells import Measured
from collectives.bench.paper.report.findings import (
    NOTICEABLE,
    Figures,
    Finding,
    Judge,
    backend_of,
    communication_share,
    gain,
    is_faster,
    median_of,
    medians,
    saved_in_words,
    where,
)
from collectives.bench.paper.tables import usual_samples

__all__ = [
    "dearer_link",
    "jump",
    "lanes_in_turn",
    "means",
    "nccl_or_gloo",
    "near_linear",
    "skipping_saves",
    "slowdown",
    "speedups",
]

MOST_RANKS = 256
"""Those of the paper's largest run."""

NEAR_LINEAR = 0.5
"""Part of the ranks that the paper's 256 were worth."""

JUMP = 0.25
"""Part by which iterations must take longer at once to count as a jump."""

TIMES_LOCAL = {
    ("resnet50", "nccl"): (1.5, 2.5),
    ("resnet50", "gloo"): (2.0, 4.5),
    ("bert-base", "gloo"): (4.5, 9.0),
}
"""Times of local training that count as the paper's 2, 3 and 6, by model and backend."""


def means(record: Measured) -> dict[str, float]:
    """Returns the mean nanoseconds of an iteration by series."""
    return {
        series["name"]: float(np.mean(usual_samples(record, i)["iteration"]))
        for i, series in enumerate(record.cell["series"])
    }


def speedups(figures: Figures) -> Iterator[tuple[Measured, float]]:
    """Yields cells of figure 9 with several ranks, and how many single ranks they are worth."""
    local = {record.cell["model"]: record for record in figures["fig9"] if record.cell["ranks"] == 1}
    for record in figures["fig9"]:
        one = local.get(record.cell["model"])
        if one is not None and record.cell["ranks"] > 1:
            yield record, record.cell["ranks"] * median_of(one) / median_of(record)


def near_linear(figures: Figures) -> Iterator[Finding]:
    """Compares all ranks with a single one."""
    for record, worth in speedups(figures):
        ranks = record.cell["ranks"]
        holds = worth >= NEAR_LINEAR * ranks if ranks >= MOST_RANKS else None
        yield Finding(where(record), f"worth {worth:.2f} single ranks", holds, f"{worth / ranks:.0%} of them")


def slowdown(backend: str) -> Judge:
    """Returns the judge of how much longer iterations take than those of a rank by itself."""

    def judge(figures: Figures) -> Iterator[Finding]:
        for record, worth in speedups(figures):
            if backend_of(record) == backend:
                ranks, times = record.cell["ranks"], record.cell["ranks"] / worth
                bounds = TIMES_LOCAL.get((record.cell["model"], backend))
                tried = ranks >= MOST_RANKS and bounds is not None
                holds = bounds[0] <= times <= bounds[1] if tried and bounds is not None else None
                share = communication_share(record)
                because = f"overlap leaves {share:.0%} of an iteration to communication"
                yield Finding(where(record), f"{times:.2f} times local", holds, because)

    return judge


def dearer_link(figures: Figures) -> Iterator[Finding]:
    """Compares BERT over NCCL on 16 and on 32 GPUs."""
    found = _by_ranks(figures, "fig9", "bert-base", "nccl")
    if {16, 32} <= set(found):
        few, many = (median_of(found[ranks]) for ranks in (16, 32))
        here = f"16 GPUs {few / 1e6:.0f} ms, 32 GPUs {many / 1e6:.0f} ms"
        because = "these links are alike, and more ranks take longer"
        yield Finding("bert-base, nccl", here, few > many * (1 + NOTICEABLE), because)


def skipping_saves(figures: Figures) -> Iterator[Finding]:
    """Compares synchronisation at every 8th iteration with that at each."""
    for record in figures["fig10"]:
        saved = gain(means(record), "every 8", "every 1")
        share = communication_share(record)
        because = f"overlap leaves {share:.0%} of an iteration to communication and waiting"
        yield Finding(where(record), saved_in_words(saved), saved > NOTICEABLE, because)


def jump(figures: Figures) -> Iterator[Finding]:
    """Compares 128 GPUs with 256 in all series."""
    for model in sorted({record.cell["model"] for record in figures["fig10"]}):
        found = _by_ranks(figures, "fig10", model, "nccl")
        if {MOST_RANKS // 2, MOST_RANKS} <= set(found):
            few, many = (means(found[ranks]) for ranks in (MOST_RANKS // 2, MOST_RANKS))
            steps = {name: many[name] / few[name] - 1 for name in few}
            here = ", ".join(f"{name} {step:+.0%}" for name, step in steps.items())
            because = "iterations grow by less than a jump with some of the intervals"
            yield Finding(f"{model}, nccl", here, min(steps.values()) > JUMP, because)


def _by_ranks(figures: Figures, figure: str, model: str, backend: str) -> Mapping[int, Measured]:
    return {
        record.cell["ranks"]: record
        for record in figures[figure]
        if record.cell["model"] == model and backend_of(record) == backend
    }


def nccl_or_gloo(figures: Figures) -> Iterator[Finding]:
    """Compares NCCL with Gloo on the same model and ranks."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for record, _ in speedups(figures):
        key = (record.cell["model"], record.cell["ranks"])
        found.setdefault(key, {})[backend_of(record)] = median_of(record)
    for (model, ranks), times in found.items():
        here = ", ".join(f"{name} {ns / 1e6:.0f} ms" for name, ns in times.items())
        tried = {"nccl", "gloo"} <= set(times)
        holds = times["nccl"] < times["gloo"] * (1 - NOTICEABLE) if tried else None
        yield Finding(f"{model}, {ranks} ranks", here, holds, "computation takes most of both")


def lanes_in_turn(figures: Figures) -> Iterator[Finding]:
    """Compares three groups in turn with one."""
    for record in figures["fig12"]:
        model, backend = record.cell["model"], backend_of(record)
        saved = gain(medians(record), "rr3", "rr1")
        faster = is_faster(record, "rr3", "rr1")
        share = communication_share(record)
        because = f"overlap leaves {share:.0%} of an iteration to save with one group"
        holds = None
        if (model, backend) in {("resnet50", "gloo"), ("bert-base", "nccl")}:
            holds = faster
        elif (model, backend) == ("resnet50", "nccl"):
            holds, because = abs(saved) <= NOTICEABLE, "the groups' times differ noticeably"
        yield Finding(where(record), f"three groups take {saved_in_words(saved)} than one", holds, because)
