"""Judges of figures 7 and 8: what the size of buckets does, and how large the models are."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.bench.paper.cells import Measured
from collectives.bench.paper.report.findings import (
    NOTICEABLE,
    Figures,
    Finding,
    backend_of,
    communication_share,
    medians,
    parameters_of,
    phases,
    where,
)

__all__ = ["best_sizes", "default_size", "more_ranks", "sublinear", "times_parameters", "twice"]

TIE = 0.02
"""Part by which a size may be slower than the best one and still count as the best."""

TWICE = 2.0

DEFAULT = "25 MB"

LARGE_MB = 5
"""Size from which on the paper finds buckets large enough."""

PAPERS_BEST = {
    ("resnet", "nccl"): ("10 MB", "25 MB"),
    ("resnet", "gloo"): ("5 MB",),
    ("bert", "nccl"): ("50 MB",),
    ("bert", "gloo"): ("5 MB",),
}
"""Best sizes in the paper, by the beginning of the model's name, and by backend."""

PARAMETER_RATIO = (12, 18)
"""Ratios of parameters that count as 15."""

SHARED_CORES = 1.5
"""Ratio of forwards, which send nothing, from which on the ranks do not have a core each."""


def twice(figures: Figures) -> Iterator[Finding]:
    """Compares the best size with the worst one."""
    for record in figures["fig7"]:
        times = medians(record)
        best, worst = (pick(times, key=lambda name: times[name]) for pick in (min, max))
        ratio = times[worst] / times[best]
        share = communication_share(record)
        because = f"what overlap leaves of communication is {share:.0%} even with an all-reduce a gradient"
        yield Finding(
            where(record), f"{best} is {ratio:.2f} times as fast as {worst}", ratio > TWICE, because
        )


def default_size(figures: Figures) -> Iterator[Finding]:
    """Compares the default with the best size."""
    for record in figures["fig7"]:
        times = medians(record)
        best = min(times, key=lambda name: times[name])
        excess = times[DEFAULT] / times[best] - 1
        here = f"{excess:.1%} more time than {best}"
        yield Finding(where(record), here, excess <= NOTICEABLE, f"{best} takes that much less")


def best_sizes(figures: Figures) -> Iterator[Finding]:
    """Compares the best size with that of the paper."""
    for record in figures["fig7"]:
        times = medians(record)
        best = min(times, key=lambda name: times[name])
        here = f"{best}: " + ", ".join(f"{name} {ns / 1e6:.0f} ms" for name, ns in times.items())
        papers = PAPERS_BEST.get(
            (record.cell["model"].rstrip("0123456789").split("-")[0], backend_of(record))
        )
        holds, because = None, ""
        if papers is not None:
            near = min(times[name] for name in papers) <= times[best] * (1 + TIE)
            holds = near and _matters(record)
            differ = "no size from 5 MB on is noticeably faster than another"
            because = f"{best} is faster than {' or '.join(papers)}" if not near else differ
        yield Finding(where(record), here, holds, because)


def _matters(record: Measured) -> bool:
    """Returns whether sizes from 5 MB on differ noticeably."""
    times = [ns for name, ns in medians(record).items() if float(name.split()[0]) >= LARGE_MB]
    return max(times) / min(times) > 1 + NOTICEABLE


def more_ranks(figures: Figures) -> Iterator[Finding]:
    """Compares the fewest ranks with the most, with buckets and without."""
    fewer = {record.cell["panel"]: record for record in figures["fig7"]}
    for record in figures["fig8"]:
        other = fewer.get(record.cell["panel"])
        if other is not None and other.cell["ranks"] < record.cell["ranks"]:
            few, many = medians(other), medians(record)
            zero, most = (many[name] / few[name] - 1 for name in ("0 MB", DEFAULT))
            here = f"from {other.cell['ranks']} ranks on: 0 MB {zero:+.0%}, {DEFAULT} {most:+.0%}"
            slower = phases(record)["forward"] / phases(other)["forward"]
            if slower > SHARED_CORES:
                here += f"; ranks share cores: forward, which sends nothing, {slower - 1:+.0%}"
                yield Finding(where(record), here, None)
                continue
            because = "0 MB is not slower" if zero <= NOTICEABLE else f"{DEFAULT} is slower, too"
            yield Finding(where(record), here, zero > NOTICEABLE > most, because)


def sublinear(figures: Figures) -> Iterator[Finding]:
    """Compares the best sizes of the smallest and the largest model."""
    by_backend: dict[str, list[Measured]] = {}
    for record in figures["fig7"]:
        by_backend.setdefault(backend_of(record), []).append(record)
    for backend, records in by_backend.items():
        few, *_, many = sorted([*records, records[0]], key=parameters_of)
        if parameters_of(few) == parameters_of(many):
            continue
        sizes = []
        for record in (few, many):
            times = medians(record)
            sizes.append(float(min(times, key=lambda name: times[name]).split()[0]))
        growth = parameters_of(many) / parameters_of(few)
        here = (
            f"{sizes[0]:g} MB for {few.cell['model']}, {sizes[1]:g} MB for {many.cell['model']} of "
            f"{growth:.1f} times the parameters"
        )
        if not (_matters(few) or _matters(many)):
            yield Finding(backend, f"{here}; sizes from 5 MB on do not differ noticeably", None)
            continue
        because = "the larger model wants smaller buckets" if sizes[1] < sizes[0] else "the size grows more"
        yield Finding(backend, here, sizes[0] <= sizes[1] <= growth * sizes[0], because)


def times_parameters(figures: Figures) -> Iterator[Finding]:
    """Counts the parameters of the two models."""
    counts = {record.cell["model"]: parameters_of(record) for record in figures["fig6"]}
    if {"resnet50", "bert-base"} <= set(counts):
        ratio = counts["bert-base"] / counts["resnet50"]
        bert, resnet = (counts[name] / 1e6 for name in ("bert-base", "resnet50"))
        here = f"{bert:.1f} M against {resnet:.1f} M parameters: {ratio:.1f} times"
        because = "this is BERT-base; BERT-large, about three times as large, would come near"
        yield Finding("bert-base, resnet50", here, PARAMETER_RATIO[0] <= ratio <= PARAMETER_RATIO[1], because)
