"""One backward pass: what is known of it while it runs, where it stands, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from collectives.errors import DistError

REPORT_BYTES = 16384
"""Size of an encoded report; long lists are cut and counted."""

_LIMIT = REPORT_BYTES // 4 - 512
"""Bytes of each list in it; the rest is for advice."""

OUT_OF_STEP = (
    "Ranks averaged gradients of different passes. Run forward, backward and no_sync() alike on all ranks; "
    "where their inputs are uneven, train within join(). What only some ranks run belongs on .module, or "
    "under torch.no_grad()."
)


# ---- what went wrong ---------------------------------------------------------------------------------------


class ParameterFault(NamedTuple):
    """Something that can be wrong with several parameters of one backward pass.

    Attributes:
        what: what happened to the parameters.
        advice: the way out.
    """

    what: str
    advice: str

    def in_words(self, names: Sequence[str], total: int, limit: int) -> str:
        """Returns the fault with the names of its parameters.

        Args:
            names: names of the parameters that have it.
            total: number of parameters of the model.
            limit: number of bytes that the names may take; the others are counted.
        """
        shown: list[str] = []
        for name in names:
            limit -= len(name.encode()) + 2
            if limit < 0:
                shown.append(f"and {len(names) - len(shown)} more")
                break
            shown.append(name)
        return f"{len(names)} of {total} parameters {self.what}: {', '.join(shown)}"


MISSING = ParameterFault(
    "got no gradient",
    "Make every parameter take part in the loss on every rank, or pass find_unused_parameters=True; where "
    "one is never trained, freeze it before wrapping.",
)

REPEATED = ParameterFault(
    "got a gradient more than once",
    "A backward pass within the backward pass, as of activation checkpointing with use_reentrant=True, "
    "reached these parameters more than once: pass use_reentrant=False there, or static_graph=True here.",
)

CHANGED = ParameterFault(
    "got gradients not as often as in the first pass",
    "static_graph=True promises that all passes use the parameters alike; leave it out.",
)

CONVERTED = ParameterFault(
    "have another data type or size than when the module was wrapped",
    "Convert a module before wrapping it, or wrap it again afterwards.",
)


@dataclass
class ErrorReport:
    """What went wrong on this rank in one backward pass; true where anything did.

    Attributes:
        total: number of parameters that take part.
        faults: names of the parameters that have each fault.
        errors: what else went wrong, in words.
        position: where this rank stands, where the ranks are out of step.
        advice: what to do, besides what faults and position call for.
        cause: the first exception that it tells of.
    """

    total: int = 0
    faults: dict[ParameterFault, list[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    position: str = ""
    advice: list[str] = field(default_factory=list)
    cause: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self.faults or self.errors or self.position)

    def blame(self, fault: ParameterFault, name: str) -> None:
        """Adds a parameter that has a fault."""
        self.faults.setdefault(fault, []).append(name)

    def encode(self) -> bytes:
        """Returns what went wrong, then each advice, separated by zeros and padded with them."""
        reasons = [
            self.position,
            "; ".join(self.errors).replace("\0", " ").encode()[:_LIMIT].decode(errors="ignore"),
            *(fault.in_words(names, self.total, _LIMIT) for fault, names in self.faults.items()),
        ]
        advice = [fault.advice for fault in self.faults] + [OUT_OF_STEP] * bool(self.position) + self.advice
        text = "\0".join(["; ".join(filter(None, reasons)), *advice])
        return text.encode()[:REPORT_BYTES].ljust(REPORT_BYTES, b"\0")


# ---- passes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """Where a rank stands in its program when it averages; ranks in step have equal ones.

    Attributes:
        forwards: forwards in training mode since the synchronised pass before this one.
        unsynced: passes under ``no_sync`` since then.
        repeated: whether the pass belongs to forwards that all had a synchronised pass already.
    """

    forwards: int = 0
    unsynced: int = 0
    repeated: bool = False

    def __str__(self) -> str:
        again = (
            "is once more one of a forward that had one" if self.repeated else "is the first of its forward"
        )
        return (
            f"ran {self.forwards} forwards and {self.unsynced} backward passes under no_sync since the "
            f"synchronised backward pass before, and this one {again}"
        )


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


@dataclass(frozen=True)
class UnevenForward:
    """What is known of a forward on uneven inputs, within a Join.

    Attributes:
        announce: tells the ranks that have joined of the backward pass before it communicates; ``None`` where
            they know.
        counted: number of ranks whose gradients count; ``None`` for all.
    """

    announce: Callable[[], None] | None = None
    counted: int | None = None


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

    The reducer writes it; all others read it, and add to the report.

    Attributes:
        counts: for each parameter, how often its gradient came.
        report: what went wrong.
        used_before: for each parameter 1 where an earlier pass under ``no_sync`` gave it a gradient.
        sync: whether the pass averages.
        committed: whether it accumulates gradients, although none came yet.
        broken: whether a reduction could not be issued, so that the ranks cannot be brought together.
        broken_off: whether the communication hook failed, here or on another rank, or that of another model.
        told: what all ranks raise for that, where they have met.
        abandoned: whether an exception broke it off.
        nested: whether the current task is within another one.
        ending: whether the outermost task is complete.
        delayed: whether delayed gradients came.
        ready_order: parameters in the order in which their gradients came.
        unused: parameters for which something else than a gradient of this pass is sent.
        skipped: parameters whose buckets are not sent.
        forwards: the forwards whose outputs it reached.
        casts_active: whether casts stand in for the parameters.
        shadow: whether it is one of other ranks, in which this one, which has joined, only takes part.
        zeros_only: whether zeros are sent for unused parameters, whatever is in ``.grad``.
        uneven: what is known of its forward where ranks train on uneven inputs.
        strangers: names of parameters that got a gradient and are not averaged.
    """

    counts: list[int]
    report: ErrorReport
    used_before: Sequence[int]
    sync: bool = False
    committed: bool = False
    broken: bool = False
    broken_off: bool = False
    told: DistError | None = None
    abandoned: bool = False
    nested: bool = False
    ending: bool = False
    delayed: bool = False
    ready_order: list[int] = field(default_factory=list)
    unused: set[int] = field(default_factory=set)
    skipped: Collection[int] = frozenset()
    casts_active: bool = False
    shadow: bool = False
    zeros_only: bool = False
    uneven: UnevenForward | None = None
    forwards: list[Forward] = field(default_factory=list)
    strangers: dict[str, None] = field(default_factory=dict)

    def took_part(self) -> bool:
        """Returns whether the pass reached a parameter, or would have."""
        return self.committed or self.delayed or any(self.counts)

    def position(self, progress: Progress) -> Position | None:
        """Returns where this rank stands; ``None`` where it only shadows others."""
        if self.shadow:
            return None
        repeated = bool(self.forwards) and all(forward.averaged for forward in self.forwards)
        return Position(progress.forwards, progress.unsynced, repeated)
