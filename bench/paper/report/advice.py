"""What follows from the measurements for a training job (section 6.1): buckets, accumulation, machines."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.bench.paper.figures import INTERVALS
from collectives.bench.paper.report.findings import NOTICEABLE, Figures, gain, medians, where
from collectives.bench.paper.report.scaling import means, speedups

__all__ = ["advice_lines"]


def advice_lines(figures: Figures) -> Iterator[str]:
    """Yields a line for each choice that the figures decide."""
    best: dict[str, str] = {}
    for record in [*figures.get("fig7", ()), *figures.get("fig8", ())]:
        times = medians(record)
        size = min(times, key=lambda name: times[name])
        best[f"- {where(record)}: buckets of {size}."] = ""
    yield from best
    for record in figures.get("fig10", ()):
        saved = gain(means(record), f"every {INTERVALS[-1]}", f"every {INTERVALS[0]}")
        say = "accumulate gradients" if saved > NOTICEABLE else "synchronise every iteration"
        yield f"- {where(record)}: {say}; every {INTERVALS[-1]} iterations saves {saved:.0%}."
    for record, worth in speedups(figures) if "fig9" in figures else ():
        yield f"- {where(record)}: worth {worth:.2f} single ranks."
