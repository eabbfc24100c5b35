"""What is known of one backward pass while it runs, and of the forwards before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from collectives.ddp.sync.error_report import ErrorReport
from collectives.ddp.sync.signals import Position

__all__ = ["BackwardPass", "Forward", "Progress"]


@dataclass(eq=False)
class Forward:
    """One forward that recorded a graph.

    Attributes:
        sync: whether its backward pass averages.
        averaged: whether a synchronised pass over it began.
        overtaken: number of synchronised passes of other forwards that ended since.
    """

    sync: bool
    averaged: bool = False
    overtaken: int = 0


@dataclass
class Progress:
    """What this rank did since the last synchronised pass; the next one compares it between the ranks.

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
class BackwardPass:
    """One backward pass: the outermost task of the autograd engine, with those nested in it.

    Attributes:
        counts: for each parameter, how often its gradient came.
        report: what went wrong.
        used_before: for each parameter 1 where an earlier pass under ``no_sync`` gave it a gradient.
        sync: whether the pass averages.
        committed: whether it accumulates gradients, although none came yet.
        broken: whether a reduction could not be issued, so that the ranks cannot be brought together.
        broken_off: whether the communication hook failed, here or on another rank.
        abandoned: whether an exception broke it off.
        nested: whether the current task is within another one.
        ending: whether the outermost task is complete.
        delayed: whether delayed gradients came.
        ready_order: parameters in the order in which their gradients came.
        unused: parameters for which something else than a gradient of this pass is sent.
        skipped: parameters whose buckets are not sent.
        forwards: the forwards whose outputs it reached.
        casts_active: whether casts stand in for the parameters.
        cause: the first exception that the report tells of.
        shadow: whether it is one of other ranks, in which this one, which has joined, only takes part.
        zeros_only: whether zeros are sent for unused parameters, whatever is in ``.grad``.
        joining: whether ranks with uneven inputs join.
        strangers: names of parameters that got a gradient and are not averaged.
    """

    counts: list[int]
    report: ErrorReport
    used_before: Sequence[int]
    sync: bool = False
    committed: bool = False
    broken: bool = False
    broken_off: bool = False
    abandoned: bool = False
    nested: bool = False
    ending: bool = False
    delayed: bool = False
    ready_order: list[int] = field(default_factory=list)
    unused: set[int] = field(default_factory=set)
    skipped: Collection[int] = frozenset()
    casts_active: bool = False
    cause: BaseException | None = None
    shadow: bool = False
    zeros_only: bool = False
    joining: bool = False
    forwards: list[Forward] = field(default_factory=list)
    strangers: dict[str, None] = field(default_factory=dict)

    def abandon(self) -> None:
        """Takes note that an exception broke the pass off."""
        self.abandoned = True
        self.report.errors.append("its backward pass was broken off by an exception, which is raised there")

    def took_part(self) -> bool:
        """Returns whether the pass reached a parameter, or would have."""
        return self.committed or self.delayed or any(self.counts)

    def position(self, progress: Progress) -> Position | None:
        """Returns where this rank stands; ``None`` where it only shadows others."""
        if self.shadow:
            return None
        repeated = bool(self.forwards) and all(forward.averaged for forward in self.forwards)
        return Position(progress.forwards, progress.unsynced, repeated)
