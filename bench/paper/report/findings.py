"""What a judge finds, and how it reads the samples: medians, spreads, and when two times differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.bench.comparison.torch_peer import PREFIX
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.tables import usual_samples

__all__ = [
    "NOTICEABLE",
    "Figures",
    "Finding",
    "Judge",
    "backend_of",
    "communication_share",
    "gain",
    "is_faster",
    "median_of",
    "medians",
    "parameters_of",
    "phases",
    "saved_in_words",
    "spread",
    "sweeps",
    "where",
]

NOTICEABLE = 0.1
"""Part by which two times must differ before one counts as longer."""

Figures = Mapping[str, Sequence[Measured]]
"""The cells that are kept, by figure."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured where a statement can be tried.

    Attributes:
        where: model, backend and ranks.
        here: the measurement in words.
        holds: whether the statement does; ``None`` where it says nothing of such a measurement.
        because: the measurement that shows why it does not; may be empty.
    """

    where: str
    here: str
    holds: bool | None
    because: str = ""


Judge = Callable[[Figures], Iterator[Finding]]
"""Yields what was found, given the figures that a statement needs."""


# ---- which cell ----------------------------------------------------------------------------------------


def where(record: Measured) -> str:
    """Returns panel and ranks of a cell."""
    return f"{record.cell['panel']}, {record.cell['ranks']} ranks"


def backend_of(record: Measured) -> str:
    """Returns the backend of a cell without whose wrapper it was; empty of a rank by itself."""
    name = record.cell.get("backend") or record.cell["panel"].partition(", ")[2]
    return str(name).removeprefix(PREFIX)


def parameters_of(record: Measured) -> int:
    """Returns the number of trained parameters of a cell's model."""
    return sum(record.samples["sizes"])


def sweeps(figures: Figures) -> Iterator[tuple[Measured, list[float]]]:
    """Yields the all-reduces of figure 2, with the median total time in nanoseconds of each count."""
    for record in figures["fig2"]:
        if record.cell["kind"] == "AllReduceSweep":
            yield record, [float(np.median(calls)) for calls in record.samples["total_ns"]]


# ---- times of a cell -----------------------------------------------------------------------------------


def median_of(record: Measured, number: int = 0) -> float:
    """Returns the median nanoseconds of an iteration of a series."""
    return float(np.median(usual_samples(record, number)["iteration"]))


def medians(record: Measured) -> dict[str, float]:
    """Returns the median nanoseconds of an iteration by series."""
    return {series["name"]: median_of(record, i) for i, series in enumerate(record.cell["series"])}


def phases(record: Measured, number: int = 0) -> dict[str, float]:
    """Returns the median nanoseconds of a series by phase, with those of the iteration."""
    return {name: float(np.median(times)) for name, times in usual_samples(record, number).items()}


def spread(record: Measured, number: int = 0) -> float:
    """Returns half of the range from p10 to p90 of a series, as part of its median."""
    p10, median, p90 = np.percentile(usual_samples(record, number)["iteration"], (10, 50, 90))
    return float((p90 - p10) / median / 2)


def communication_share(record: Measured) -> float:
    """Returns the part of an iteration that communication takes in the first series."""
    times = phases(record)
    return times["communication"] / times["iteration"]


def gain(times: Mapping[str, float], fast: str, slow: str) -> float:
    """Returns the part of a slow series' time that a fast one saves; less than 0 where it takes longer."""
    return 1 - times[fast] / times[slow]


def saved_in_words(saved: float) -> str:
    """Returns the part of the time that something saves, or takes in addition."""
    return f"{abs(saved):.1%} {'less' if saved >= 0 else 'more'} time"


def is_faster(record: Measured, fast: str, slow: str) -> bool:
    """Returns whether a series is faster than another by more than noise."""
    names = [series["name"] for series in record.cell["series"]]
    noise = max(NOTICEABLE, spread(record, names.index(slow)))
    return gain(medians(record), fast, slow) > noise
