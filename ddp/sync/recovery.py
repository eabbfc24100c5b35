"""How the ranks come together again after a communication hook failed on some of them.

A hook issues what it likes. A rank whose hook failed does not know what those of the other ranks wait for,
and can neither send that nor let them know over the same group. So it breaks the groups that hooks use. What
is in flight then fails on all ranks, which leave the pass, connect these groups anew, and tell each other
what went wrong.

Where passes do not wait for the device, the other ranks may be some passes ahead before they hear of it. Each
raises in the pass that it is at, and the ranks meet before the next one. Those that raised in an earlier pass
than others then raise in each one up to that of the others. So all have left out the same passes, and the
ranks' loops, of which an error ends an iteration, go on with the same one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from collectives import ProcessGroup
from collectives.core.forwarding import group_behind
from collectives.ddp.default_group import default_group_or_none
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.sync.error_report import ErrorReport, ReportExchange, sync_error
from collectives.errors import DistError, GroupAbortedError, UnsupportedOperationError

__all__ = ["Recovery", "gather_records"]

_BROKEN_BY_HOOK = "communication_hook"
"""The operation that errors name where a hook's failure broke the group."""

_BROKE_OFF = "broke off a backward pass"

_USED = (
    "Some ranks had begun the next pass when they learned of it. What an optimizer made of these gradients "
    "there is wrong: load a checkpoint."
)

_MOMENT_S = 0.2

_GROUPS = (ProcessGroup, torch.distributed.ProcessGroup)


class Recovery:
    """Brings the ranks together after a pass of which a communication hook failed.

    Attributes:
        owed: this rank's report of a pass that it left early, where others wait to meet, or may.
        ended: number of synchronised passes that ended, well or not, or did not begin for an error.
        left_out: how many have to have ended before the next one may begin.

    Args:
        group: the ranks.
        model: the model in words, for messages.
        device: device of tensors that the group takes.
    """

    def __init__(self, group: ProcessGroup, model: str, device: torch.device) -> None:
        self._group = group
        self._model = model
        self._device = device
        self._hook: tuple[Any, Any] = None, None
        self._failure: GroupAbortedError | None = None
        self.owed: ErrorReport | None = None
        self.ended = self.left_out = 0
        self._told = GradientSyncError()

    def serve(self, hook: object, state: object) -> None:
        """Takes note of the hook that reduces."""
        self._hook = hook, state

    def hook_failed(self, why: str, error: BaseException, *, ending: bool) -> None:
        """Takes note that the hook of this rank failed; it is to leave the pass then, or to meet the others.

        Those may have failed as well and be about to say why. So they have a moment before groups are broken.

        Args:
            why: what failed, in words.
            error: what the hook raised.
            ending: whether the backward pass is over, so that this rank issues nothing more before they meet.
        """
        rank = self._group.rank()
        cause = DistError(f"{type(error).__name__}: {error}", rank)
        text = f"rank {rank} {_BROKE_OFF}: {why}: {cause}"
        number = self.ended + 1
        self._failure = GroupAbortedError(text, rank, operation=_BROKEN_BY_HOOK, sequence=number, cause=cause)
        if not ending:
            time.sleep(_MOMENT_S)
            self._break_off()

    def is_broken_off(self) -> bool:
        """Returns whether the hook of a rank failed and that has broken a group here."""
        return self._cause() is not None

    def comes_of_it(self, error: BaseException | None) -> bool:
        """Returns whether an error of this rank's hook is what came of another one's."""
        broken_off = self.is_broken_off()
        while broken_off and error is not None:
            # Futures of torch make their errors anew, of which only the words are left.
            if isinstance(error, DistError) or _BROKE_OFF in str(error):
                return True
            error = error.__cause__ or error.__context__
        return False

    def meet(self, report: ErrorReport, passes: int, *, after: bool) -> tuple[GradientSyncError, int]:
        """Connects the groups anew; called by all ranks, blocks.

        Args:
            report: what went wrong on this rank.
            passes: number of passes that ended well, as far as this rank knows.
            after: whether this rank has left the pass; else it is within the one in which it raises.

        Returns:
            The error that all ranks raise, and the number of passes that ended well.

        Raises:
            DistError: a rank has died, or does not come.
        """
        number = self.ended if after else self.ended + 1
        others = self._groups()[1:]
        try:
            self._group._renew(self._break_off)
        except UnsupportedOperationError as error:
            return self.leave(report, f"{error}; make a new group"), passes
        self._failure = self.owed = None
        mine = {
            "groups": [other.group_name for other in others],
            "iter": self._iteration(),
            "pass": number,
            "passes": passes,
        }
        records = gather_records(self._group, mine, self._device)
        by_rank = dict(zip(self._group.global_ranks, records, strict=True))
        for other in others:
            if all(other.group_name in by_rank[member]["groups"] for member in other.global_ranks):
                other._renew()
        if self._group.is_stream_ordered(self._device):
            self.left_out = max(record["pass"] for record in records)
            # Ranks that raised in later passes, or do not know of earlier errors yet, used what came of them.
            if len({record["pass"] for record in records}) > 1 or (
                len({record["pass"] - record["passes"] for record in records}) > 1
            ):
                report.advice.append(_USED)
        self._reset_hook(max(record["iter"] for record in records))
        self._told = ReportExchange(self._group, report, self._device).error(self._model)
        return self._told, min(record["passes"] for record in records)

    def owe(self, report: ErrorReport) -> None:
        """Takes note that this rank leaves a pass before it knows how that ends."""
        self._break_off()
        self.owed = report

    def leave(self, report: ErrorReport, note: str = "") -> GradientSyncError:
        """Returns what this rank can tell alone of a pass that broke off; the ranks meet before the next one.

        Args:
            report: what went wrong on this rank.
            note: what else there is to say.
        """
        self.owe(report)
        cause, rank = self._cause(), self._group.rank()
        if cause is not None and not report:
            rank, report = cause.rank, ErrorReport(errors=[str(cause)])
            report.advice += [_USED] if 0 <= cause.sequence <= self.ended else []
        report.errors += [note] if note else []
        return sync_error(self._group, self._model, {rank: report.encode()})

    def explain_last(self, error: DistError) -> DistError:
        """Returns what to raise for an error of passes after which the ranks do not meet again."""
        if isinstance(error, GradientSyncError) or not self.is_broken_off():
            return error
        return self.leave(ErrorReport())

    def check_next(self) -> None:
        """Raises where other ranks have left out the pass that is about to begin.

        Raises:
            GradientSyncError: they did.
        """
        if self.ended < self.left_out:
            self.ended += 1
            why = "This pass is left out, too, because other ranks learned of that here or later."
            raise GradientSyncError(f"{self._told}\n{why}", self._told.reasons)

    # ---- inside ------------------------------------------------------------------------------------------

    def _break_off(self) -> None:
        """Lets all that is in flight fail, and the other ranks know, where this one's hook failed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            for group in self._groups():
                details = {**failure.details(), "rank": group.rank()}
                group._break_for(GroupAbortedError(failure.args[0], **details, cause=failure.cause))

    def _groups(self) -> Sequence[ProcessGroup]:
        """Returns the groups that hooks use: the model's, and others of its ranks that they name."""
        members = set(self._group.global_ranks)
        default = default_group_or_none()
        found = [*_named_by(*self._hook), *([] if default is None else [default])]
        others = {group for group in found if members.issuperset(group.global_ranks)}
        others.discard(self._group)
        return [self._group, *sorted(others, key=lambda group: group.group_name)]

    def _cause(self) -> GroupAbortedError | None:
        """Returns what broke the first group that a hook's failure broke."""
        for group in self._groups() if self._hook[0] is not None else ():
            cause = group._first_cause()
            if isinstance(cause, GroupAbortedError) and cause.operation == _BROKEN_BY_HOOK:
                return cause
        return None

    def _iteration(self) -> int:
        """Returns what the hook's state counts, as those of torch's hooks and ours do."""
        count = getattr(self._hook[1], "iter", None)
        return count if type(count) is int else 0

    def _reset_hook(self, iteration: int) -> None:
        """Lets the hook and its state begin anew what the ranks have in common."""
        if type(getattr(self._hook[1], "iter", None)) is int:
            self._hook[1].iter = iteration
        for listener in self._hook:
            tell = getattr(listener, "pass_failed", None)
            if callable(tell):
                tell()


def _named_by(hook: Any, state: object) -> Iterator[ProcessGroup]:
    """Yields the groups that hook and state hold, as far as that shows."""
    method, partial = getattr(hook, "__self__", None), getattr(hook, "keywords", {})
    for one in (hook, method, *getattr(hook, "args", ()), *partial.values(), state):
        parts = (
            one.values()
            if isinstance(one, Mapping)
            else vars(one).values()
            if hasattr(one, "__dict__")
            else ()
        )
        for part in (one, *parts):
            group = group_behind(part) if isinstance(part, _GROUPS) else None
            if group is not None:
                yield group


def gather_records(group: ProcessGroup, record: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Returns the records of all ranks; called by all of them, blocks.

    Args:
        group: the ranks.
        record: this rank's, of values that JSON has; the same names on all ranks.
        device: device of tensors that the group takes.
    """

    def gather(mine: torch.Tensor) -> torch.Tensor:
        everyone = mine.new_empty(group.size() * mine.numel(), device=device)
        group.all_gather_single(everyone, mine.to(device)).wait()
        return group.to_host(everyone).view(group.size(), -1)

    text = json.dumps(record).encode()
    longest = int(gather(torch.tensor([len(text)])).max())
    rows = gather(torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
    return [json.loads(row.numpy().tobytes()) for row in rows]
