"""The verdict: how all ranks come to know, within one backward pass, that some of them lack gradients.

A rank in trouble still takes part in every reduction of the pass, so that no peer waits for it, and raises a
flag in the last one. Where the reduced flag is down, which costs nothing to find out, the pass is good on all
ranks. Where it is up, all ranks exchange their reports and raise the same error.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from collectives import ProcessGroup
from collectives.ddp.errors import GradientSyncError

__all__ = ["Report", "ReportExchange", "sync_error"]

_REPORT_BYTES = 16384
"""Size of a report on the wire: a byte for the kinds of fault, then text; long lists are cut and counted."""


class _Fault(enum.IntFlag):
    MISSING = 1
    REPEATED = 2
    CHANGED = 4
    OTHER = 8
    OUT_OF_STEP = 16


_ADVICE = {
    _Fault.MISSING: "Make every parameter take part in the loss on every rank, or pass "
    "find_unused_parameters=True; where one is never trained, freeze it before wrapping.",
    _Fault.REPEATED: "A backward pass within the backward pass, as of activation checkpointing with "
    "use_reentrant=True, reached these parameters more than once: pass use_reentrant=False there, or "
    "static_graph=True here.",
    _Fault.CHANGED: "static_graph=True promises that all passes use the parameters alike; leave it out.",
    _Fault.OUT_OF_STEP: "Ranks averaged gradients of different passes. Run forward, backward and no_sync() "
    "alike on all ranks; where their inputs are uneven, train within join(). What only some ranks run "
    "belongs on .module, or under torch.no_grad().",
}


@dataclass
class Report:
    """What went wrong on this rank in one backward pass; true where anything did.

    Attributes:
        total: number of parameters that take part.
        missing: names of the parameters that got no gradient.
        repeated: names of those that got one again after it was given to its bucket.
        changed: names of those that got gradients more or fewer times than in the first pass of a static
            graph.
        errors: what else went wrong, in words.
        position: where this rank stands, where the ranks are out of step.
    """

    total: int = 0
    missing: Sequence[str] = ()
    repeated: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    position: str = ""

    def __bool__(self) -> bool:
        return bool(self.missing or self.repeated or self.changed or self.errors or self.position)

    def encode(self) -> bytes:
        """Returns the report for the wire, padded with zeros."""
        faults = (
            _Fault.MISSING * bool(self.missing)
            | _Fault.REPEATED * bool(self.repeated)
            | _Fault.CHANGED * bool(self.changed)
            | _Fault.OTHER * bool(self.errors)
            | _Fault.OUT_OF_STEP * bool(self.position)
        )
        budget = _REPORT_BYTES // 4 - 64
        text = "; ".join(
            [
                *([self.position] if self.position else []),
                *(["; ".join(self.errors).encode()[:budget].decode(errors="ignore")] if self.errors else []),
                *self._listed(self.missing, "got no gradient", budget),
                *self._listed(self.repeated, "got a gradient more than once", budget),
                *self._listed(self.changed, "got gradients not as often as in the first pass", budget),
            ]
        )
        return bytes([faults]) + text.encode().ljust(_REPORT_BYTES - 1, b"\0")

    def _listed(self, names: Sequence[str], what: str, budget: int) -> list[str]:
        if not names:
            return []
        shown: list[str] = []
        for name in names:
            budget -= len(name.encode()) + 2
            if budget < 0:
                shown.append(f"and {len(names) - len(shown)} more")
                break
            shown.append(name)
        return [f"{len(names)} of {self.total} parameters {what}: {', '.join(shown)}"]


class ReportExchange:
    """The exchange of the ranks' reports, issued by all of them after the last reduction of a pass.

    Blocks only in :meth:`wait` and :meth:`error`.

    Args:
        group: the ranks.
        report: this rank's report; an empty one where it has no fault.
        device: device of tensors that the group takes.
    """

    def __init__(self, group: ProcessGroup, report: Report, device: torch.device) -> None:
        self._group = group
        self._mine = torch.frombuffer(bytearray(report.encode()), dtype=torch.uint8).to(device)
        self._all = torch.empty(group.size() * _REPORT_BYTES, dtype=torch.uint8, device=device)
        self._work = group.all_gather_single(self._all, self._mine)

    def wait(self) -> None:
        """Blocks until the reports of all ranks are here."""
        self._work.wait()

    def error(self, model: str) -> GradientSyncError:
        """Returns the error that every rank raises, made from the reports of all; blocks until they are here.

        Args:
            model: the model in words.
        """
        self.wait()
        rows = self._all.cpu().view(self._group.size(), _REPORT_BYTES)
        return sync_error(self._group, model, {rank: row.numpy().tobytes() for rank, row in enumerate(rows)})


def sync_error(group: ProcessGroup, model: str, reports: Mapping[int, bytes]) -> GradientSyncError:
    """Returns the error for encoded reports of some ranks; reports without a fault are left out.

    Args:
        group: the ranks.
        model: the model in words.
        reports: encoded reports by rank.
    """
    faulty = {rank: report for rank, report in reports.items() if report[0]}
    reasons = {rank: report[1:].rstrip(b"\0").decode(errors="replace") for rank, report in faulty.items()}
    head = (
        f"[rank {group.rank()}] {model} over {group.describe()}: the gradients of this backward pass could "
        f"not be averaged, because of rank{'s' if len(reasons) > 1 else ''} {', '.join(map(str, reasons))}:"
    )
    lines = [
        head,
        *(f"  rank {rank}: {reason}" for rank, reason in reasons.items()),
        *(
            advice
            for fault, advice in _ADVICE.items()
            if any(report[0] & fault for report in faulty.values())
        ),
    ]
    return GradientSyncError("\n".join(lines), reasons)
