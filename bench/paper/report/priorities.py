"""What priorities among gradients could save (section 7): a bound, computed from the samples of figure 2.

Jayarajan et al. (P3, MLSys 2019) send first what the next forward needs first, in pieces, and let forward
begin before the rest is there. The schedules are played with the measured times at which gradients are ready
and the measured cost of all-reduces; communication takes nothing from computation, so that it is a bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from collectives.bench.paper.report.findings import NOTICEABLE, Figures, backend_of, sweeps

__all__ = ["Costs", "Gradient", "forward_ends_s", "priority_lines"]

MIB = 1 << 20
BYTES = 4
"""Of a parameter."""

PIECES_MB = (25.0, 4.0, 1.0, 0.25)
"""Sizes of buckets, which are the pieces among which priorities choose."""

FORWARD = 0.5
"""Time of forward as part of backward's, of which figure 2 has the times."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient of the model, in the order in which they are ready.

    Attributes:
        ready_s: when it is, from the beginning of backward.
        parameters: number of its elements.
    """

    ready_s: float
    parameters: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What an all-reduce takes.

    Attributes:
        message_s: whatever its size.
        parameter_s: for each parameter in addition.
    """

    message_s: float
    parameter_s: float

    def of(self, parameters: int) -> float:
        """Returns the seconds of one of so many parameters."""
        return self.message_s + parameters * self.parameter_s

    @classmethod
    def measured(cls, counts: Sequence[int], totals_s: Sequence[float], parameters: int) -> Costs:
        """Returns those of a sweep: by its best total, and by what its smallest all-reduces take in addition.

        Args:
            counts: parameters of each all-reduce.
            totals_s: of all of them, by count.
            parameters: in all.
        """
        parameter_s = min(totals_s) / parameters
        message_s = counts[0] * (totals_s[0] / parameters - parameter_s)
        return cls(max(0.0, message_s), parameter_s)


def forward_ends_s(
    gradients: Sequence[Gradient], costs: Costs, piece_mb: float, *, by_layer: bool, priorities: bool
) -> float:
    """Returns when the next forward is over, from the beginning of backward.

    Args:
        gradients: of the model; forward needs them in the opposite order.
        costs: of all-reduces.
        piece_mb: size at which a piece is full; a larger gradient is sent in several.
        by_layer: whether a layer waits for its own gradients only, and not for all.
        priorities: whether of the pieces that are ready the one is sent that forward needs first, and not the
            one that was ready first.
    """
    done = _ends(gradients, costs, int(piece_mb * MIB / BYTES), priorities)
    now = backward_s = gradients[-1].ready_s
    if not by_layer:
        now = max(now, *done)
    for place in reversed(range(len(gradients))):
        begun_s = gradients[place - 1].ready_s if place else 0.0
        now = max(now, done[place]) + FORWARD * (gradients[place].ready_s - begun_s)
    return max(now, (1 + FORWARD) * backward_s)


def _ends(gradients: Sequence[Gradient], costs: Costs, full: int, priorities: bool) -> list[float]:
    """Returns when each gradient is averaged."""
    pieces = list(_pieces(gradients, full))
    done = [0.0] * len(gradients)
    waiting: list[tuple[int, int]] = []
    now, coming = 0.0, 0
    while coming < len(pieces) or waiting:
        if not waiting:
            now = max(now, gradients[pieces[coming][0][-1]].ready_s)
        while coming < len(pieces) and gradients[pieces[coming][0][-1]].ready_s <= now:
            needed = -pieces[coming][0][-1] if priorities else 0
            heapq.heappush(waiting, (needed, coming))
            coming += 1
        members, parameters = pieces[heapq.heappop(waiting)[1]]
        now += costs.of(parameters)
        for place in members:
            done[place] = max(done[place], now)
    return done


def _pieces(gradients: Sequence[Gradient], full: int) -> Iterator[tuple[list[int], int]]:
    """Yields the gradients that lie in each piece, and its parameters, in the order of readiness."""
    members: list[int] = []
    held = 0
    for place, gradient in enumerate(gradients):
        members.append(place)
        held += gradient.parameters
        while held > full:
            yield list(members), full
            members, held = [place], held - full
        if held == full or (place == len(gradients) - 1 and held):
            yield members, held
            members, held = [], 0


def priority_lines(figures: Figures) -> Iterator[str]:
    """Yields the schedules side by side for each backend, where figure 2 was measured."""
    ready = [record for record in figures.get("fig2", ()) if record.cell["kind"] == "ReadyGradients"]
    if not ready:
        yield "No samples of fig2."
        return
    ready_s = np.median(ready[0].samples["ready_ns"], axis=0) / 1e9
    sizes = reversed(ready[0].samples["sizes"])
    gradients = [Gradient(float(s), size) for s, size in zip(ready_s, sizes, strict=True)]
    yield (
        f"Backward of {ready[0].cell['model']} and the next forward, in ms, with pieces of the best of "
        f"{', '.join(f'{size:g}' for size in PIECES_MB)} MB: forward after all averages, as it is; layers "
        "that wait for their own; and the piece first that forward needs first, too."
    )
    yield ""
    yield "| backend | as it is | by layer | with priorities | saved by layer | by priorities, too |"
    yield "|---|---|---|---|---|---|"
    for record, totals in sweeps(figures):
        cell = record.cell
        costs = Costs.measured(cell["counts"], [total / 1e9 for total in totals], cell["parameters"])
        best = [
            _best(gradients, costs, by_layer=by_layer, priorities=priorities)
            for by_layer, priorities in ((False, False), (True, False), (True, True))
        ]
        times_s = [seconds for seconds, _ in best]
        row = [f"{1e3 * seconds:.0f} ({size:g} MB)" for seconds, size in best]
        for before, after in pairwise(times_s):
            saved = 1 - after / before
            row.append(f"{saved:.0%}: {'worth a trial' if saved > NOTICEABLE else 'not worth it'}")
        yield f"| {backend_of(record)} | {' | '.join(row)} |"


def _best(
    gradients: Sequence[Gradient], costs: Costs, *, by_layer: bool, priorities: bool
) -> tuple[float, float]:
    """Returns the shortest time of a schedule, and the size of pieces that has it."""
    return min(
        (forward_ends_s(gradients, costs, size, by_layer=by_layer, priorities=priorities), size)
        for size in PIECES_MB
    )
