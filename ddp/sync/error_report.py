"""Error reports: how all ranks learn, within one backward pass, what went wrong on some of them.

A rank with an error still takes part in every reduction of the pass, so that no peer waits for it, and raises
a flag in the last one. Where the reduced flag is down, which costs nothing to find out, the pass is good on
all ranks. Where it is up, all ranks exchange their reports and raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from collectives import ProcessGroup
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.unused_parameters.errors import ParameterFault, in_words

__all__ = ["ErrorReport", "ReportExchange", "late_error", "sync_error"]

_REPORT_BYTES = 16384
"""Size of an encoded report; long lists are cut and counted."""

_LIMIT = _REPORT_BYTES // 4 - 512
"""Bytes of each list in it; the rest is for advice."""

_OUT_OF_STEP = (
    "Ranks averaged gradients of different passes. Run forward, backward and no_sync() alike on all ranks; "
    "where their inputs are uneven, train within join(). What only some ranks run belongs on .module, or "
    "under torch.no_grad()."
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
    """

    total: int = 0
    faults: dict[ParameterFault, list[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    position: str = ""
    advice: list[str] = field(default_factory=list)

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
            *(in_words(fault, names, self.total, _LIMIT) for fault, names in self.faults.items()),
        ]
        advice = [fault.advice for fault in self.faults] + [_OUT_OF_STEP] * bool(self.position) + self.advice
        text = "\0".join(["; ".join(filter(None, reasons)), *advice])
        return text.encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0")


class ReportExchange:
    """The exchange of the ranks' reports, issued by all of them after the last reduction of a pass.

    Blocks only in :meth:`wait` and :meth:`error`.

    Args:
        group: the ranks.
        report: this rank's report; an empty one where nothing went wrong.
        device: device of tensors that the group takes.
    """

    def __init__(self, group: ProcessGroup, report: ErrorReport, device: torch.device) -> None:
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
        rows = self._group.to_host(self._all).view(self._group.size(), _REPORT_BYTES)
        return sync_error(self._group, model, {rank: row.numpy().tobytes() for rank, row in enumerate(rows)})


def sync_error(group: ProcessGroup, model: str, reports: Mapping[int, bytes]) -> GradientSyncError:
    """Returns the error for encoded reports of some ranks; empty ones are left out.

    Args:
        group: the ranks.
        model: the model in words.
        reports: encoded reports by rank.
    """
    reasons: dict[int, str] = {}
    advice: dict[str, None] = {}
    for rank, report in reports.items():
        reason, *ways_out = report.rstrip(b"\0").decode(errors="replace").split("\0")
        if reason:
            reasons[rank] = reason
            advice.update(dict.fromkeys(ways_out))
    head = (
        f"[rank {group.rank()}] {model} over {group.describe()}: the gradients of this backward pass could "
        f"not be averaged, because of rank{'s' if len(reasons) > 1 else ''} {', '.join(map(str, reasons))}:"
    )
    lines = [head, *(f"  rank {rank}: {reason}" for rank, reason in reasons.items()), *advice]
    return GradientSyncError("\n".join(lines), reasons)


def late_error(
    group: ProcessGroup, model: str, which: str, ranks: Sequence[int], report: ErrorReport
) -> GradientSyncError:
    """Returns the error of ranks that learn of one after the pass.

    Args:
        group: the ranks.
        model: the model in words.
        which: the pass in words.
        ranks: those that raised an error; none where the ranks were out of step.
        report: what this rank says of the pass.
    """
    if ranks:
        reasons = dict.fromkeys(ranks, "it raised an error at the end of that pass, which tells more")
        why = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}, where the error was raised"
    else:
        reasons = {group.rank(): report.position}
        why = f"ranks that were out of step: this rank {report.position}, and others did not. {_OUT_OF_STEP}"
    return GradientSyncError(
        f"[rank {group.rank()}] {model} over {group.describe()}: the gradients of {which} were not averaged, "
        f"because of {why.removesuffix('.')}. What an optimizer made of them is wrong: load a checkpoint. "
        "Over a group whose waits block the host (blocking_wait of nccl), every rank raises the whole error "
        "at the end of its backward pass.",
        reasons,
    )
