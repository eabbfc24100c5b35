"""What follows from the measurements for a training job (section 6.1): buckets, accumulation, machines."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.bench.paper.cells import Measured
from collectives.bench.paper.figures import INTERVALS
from collectives.bench.paper.report.findings import NOTICEABLE, Figures, gain, is_faster, medians, where
from collectives.bench.paper.report.scaling import means, speedups

__all__ = ["advice_lines"]

_DEFAULT = "25 MB"


def advice_lines(figures: Figures) -> Iterator[str]:
    """Yields a line for each choice that the figures decide."""
    buckets = [*figures.get("fig7", ()), *figures.get("fig8", ())]
    yield from dict.fromkeys(f"- {where(record)}: {_size(record)}." for record in buckets)
    for record in figures.get("fig10", ()):
        saved = gain(means(record), f"every {INTERVALS[-1]}", f"every {INTERVALS[0]}")
        say = "accumulate gradients" if saved > NOTICEABLE else "synchronise every iteration"
        yield f"- {where(record)}: {say}; every {INTERVALS[-1]} iterations saves {saved:.0%}."
    for record, worth in speedups(figures) if "fig9" in figures else ():
        yield f"- {where(record)}: worth {worth:.2f} single ranks."


def _size(record: Measured) -> str:
    """Returns the size of buckets to take: the default one, where none saves more than noise over it."""
    times = medians(record)
    best = min(times, key=lambda name: times[name])
    if is_faster(record, best, _DEFAULT):
        return f"buckets of {best}, which save {gain(times, best, _DEFAULT):.0%} over {_DEFAULT}"
    slower = [
        f"{name} takes {times[name] / times[_DEFAULT] - 1:.0%} longer"
        for name in times
        if is_faster(record, _DEFAULT, name)
    ]
    return "; ".join([f"buckets of {_DEFAULT}, the default, as no size is noticeably faster", *slower])
