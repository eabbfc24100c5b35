"""Judges of figure 2: what all-reduces cost by size, and how long backward takes beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.bench.paper.report.findings import (
    NOTICEABLE,
    Figures,
    Finding,
    backend_of,
    spread,
    sweeps,
    where,
)

__all__ = ["flat_and_wide", "same_order", "top_speed"]

BYTES = 4
"""Of a parameter."""

SATURATED = (200_000, 1_000_000)
"""Neighbours of 500 K in the sweep: top speed that begins between the two begins near it."""

FLAT_FROM_BYTES = 512 << 10
FLAT = 1.25
"""Largest ratio of totals that still counts as one level."""

SAME_ORDER = 10


def top_speed(figures: Figures) -> Iterator[Finding]:
    """Looks for the size from which larger all-reduces gain no more."""
    for record, totals in sweeps(figures):
        counts, best = record.cell["counts"], min(totals)
        enough = next(i for i, total in enumerate(totals) if total <= best * (1 + NOTICEABLE))
        each_us = totals[0] / 1e3 / (record.cell["parameters"] / counts[0])
        here = (
            f"within {NOTICEABLE:.0%} of the best from {counts[enough]:,} parameters on; {counts[0]:,} at a "
            f"time take {totals[0] / best:.1f} times as long"
        )
        holds, because = None, ""
        if backend_of(record) == "gloo":
            holds = SATURATED[0] <= counts[enough] <= SATURATED[1]
            because = f"each all-reduce of {counts[0]:,} takes {each_us:.0f} us, many under way at once"
        elif backend_of(record) == "nccl":
            holds = totals[-1] == best
            because = f"{counts[totals.index(best)]:,} are faster than {counts[-1]:,}"
        yield Finding(where(record), here, holds, because)


def same_order(figures: Figures) -> Iterator[Finding]:
    """Compares backward with the best all-reduces of as many parameters."""
    ready = [record for record in figures["fig2"] if record.cell["kind"] == "ReadyGradients"]
    for record, totals in sweeps(figures) if ready else ():
        backward = float(np.median([times[-1] for times in ready[0].samples["ready_ns"]]))
        best = min(totals) * ready[0].samples["parameters"] / record.cell["parameters"]
        here = f"backward {backward / 1e6:.0f} ms, its all-reduces {best / 1e6:.0f} ms"
        because = f"one is {max(backward / best, best / backward):.0f} times the other"
        yield Finding(where(record), here, 1 / SAME_ORDER < backward / best < SAME_ORDER, because)


def flat_and_wide(figures: Figures) -> Iterator[Finding]:
    """Looks whether Gloo's totals are level from 512 KB on, and whether its iterations spread more."""
    for record, totals in sweeps(figures):
        large = {
            count: total
            for count, total in zip(record.cell["counts"], totals, strict=True)
            if count * BYTES >= FLAT_FROM_BYTES
        }
        if len(large) > 1:
            ratio = max(large.values()) / min(large.values())
            slowest = max(large, key=lambda count: large[count])
            holds = ratio <= FLAT if backend_of(record) == "gloo" else None
            here = f"totals beyond 512 KB differ by {ratio - 1:.0%}"
            yield Finding(where(record), here, holds, f"{slowest:,} parameters at a time take longest")
    found: dict[str, dict[str, float]] = {}
    for record in figures["fig7"]:
        widths = [spread(record, i) for i in range(len(record.cell["series"]))]
        found.setdefault(record.cell["model"], {})[backend_of(record)] = float(np.median(widths))
    for model, widths_by in found.items():
        shown = ", ".join(f"{name} {width:.0%}" for name, width in widths_by.items())
        both = {"gloo", "nccl"} <= set(widths_by)
        holds = widths_by["gloo"] > widths_by["nccl"] if both else None
        yield Finding(model, f"spread of an iteration: {shown}", holds)
