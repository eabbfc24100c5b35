"""What is known of one backward pass while it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from collectives.ddp.sync.error_report import Report
from collectives.ddp.sync.signals import Position
from collectives.ddp.unused_parameters.reach import ReachExchange

__all__ = ["Forward", "Pass", "Progress"]


@dataclass(eq=False)
class Forward:
    """One forward that recorded a graph.

    Attributes:
        sync: whether its backward pass averages.
        averaged: whether a synchronised pass over it began.
        overtaken: number of synchronised passes of other forwards that ended since.
        reach: the parameters that it can reach, where its graph was walked.
    """

    sync: bool
    averaged: bool = False
    overtaken: int = 0
    reach: ReachExchange | None = None


@dataclass
class Progress:
    """What this rank did since the last synchronised pass; the next one tells it to the others.

    Attributes:
        forwards: number of forwards in training mode.
        unsynced: number of passes that ran under ``no_sync``.
        accumulated: whether there were more of those, which do not count.
    """

    forwards: int = 0
    unsynced: int = 0
    accumulated: bool = False

    def has_gradients(self) -> bool:
        """Returns whether gradients have accumulated that were not averaged."""
        return self.accumulated or self.unsynced > 0


@dataclass
class Pass:
    """One backward pass.

    Attributes:
        counts: for each parameter, how often its gradient came.
        report: what went wrong.
        used_before: for each parameter 1 where an earlier pass under ``no_sync`` gave it a gradient.
        sync: whether the pass averages.
        committed: whether it accumulates gradients, although none came yet.
        broken: whether a reduction could not be issued, so that the ranks cannot be brought together.
        nested: whether the current task is within another one.
        ending: whether the outermost task is complete.
        triggered: whether the gradient came that delayed buckets wait for.
        came: parameters in the order in which their gradients came.
        absent: parameters for which something else than a gradient of this pass travels.
        skipped: parameters whose buckets are not sent.
        forwards: the forwards whose outputs it reached.
        entered: whether casts stand in for the parameters.
        cause: the first exception that the report tells of.
        follows: whether it is one of other ranks, which this rank only takes part in.
        silent: whether zeros travel for what is absent, whatever stands in ``.grad``.
    """

    counts: list[int]
    report: Report
    used_before: Sequence[int]
    sync: bool = False
    committed: bool = False
    broken: bool = False
    nested: bool = False
    ending: bool = False
    triggered: bool = False
    came: list[int] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)
    skipped: Collection[int] = frozenset()
    entered: bool = False
    cause: Exception | None = None
    follows: bool = False
    silent: bool = False
    forwards: list[Forward] = field(default_factory=list)

    def took_part(self) -> bool:
        """Returns whether the pass reached a parameter, or would have."""
        return self.committed or any(self.counts)

    def position(self, progress: Progress) -> Position | None:
        """Returns where this rank stands; ``None`` where it only follows."""
        if self.follows:
            return None
        repeated = bool(self.forwards) and all(forward.averaged for forward in self.forwards)
        return Position(progress.forwards, progress.unsynced, repeated)
