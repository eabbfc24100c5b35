"""What ranks do after a pass of which a communication hook failed.

A hook issues what it likes, over any groups. A rank whose hook failed does not know what those of the other
ranks wait for, and can neither send that nor let them know over the same group. So it breaks the model's
group. Each rank that sees that breaks the other groups that operations were issued to since its pass began,
also from a thread of its own, because it may wait in one of them. What is in flight then fails on all ranks,
which leave the pass, connect these groups anew, and tell each other what went wrong. Models that share a
group meet there together, as what is in flight may be of any of them.

Where passes do not wait for the device, the other ranks may be some passes ahead before they hear of it. Each
raises in the pass that it is at, and the ranks meet before the next one. Those that raised in an earlier pass
than others then raise in each one up to that of the others. So all have left out the same passes, and the
ranks' loops, of which an error ends an iteration, go on with the same one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from collectives import DistError, GroupAbortedError, ProcessGroup
from collectives.core.forwarding import outer_groups
from collectives.core.recording import dump
from collectives.ddp.agreement import gather_records
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.module.arguments import Settings
from collectives.ddp.reducer.backward_pass import ErrorReport
from collectives.ddp.reducer.end_of_pass import ReportExchange, sync_error
from collectives.errors import DistBackendError, UnsupportedOperationError
from collectives.threads import start_thread

_BROKEN_BY_HOOK = "communication_hook"
"""The operation that errors name where a hook's failure broke the group."""

_BROKE_OFF = "broke off a backward pass"

_USED = (
    "Some ranks had begun the next pass when they learned of it. What an optimizer made of these gradients "
    "there is wrong: load a checkpoint."
)

_MOMENT_S = 0.2

_TICK_S, _LONGEST_S = 0.2, 5.0
"""How long a pass lasts before it is looked at; then each time twice as long, and at most so much longer."""


class Model(Protocol):
    """What a meeting needs to know of a model.

    Attributes:
        passes: number of synchronised passes that ended well.
    """

    passes: int

    def iteration(self) -> int:
        """Returns what the state of its hook counts."""

    def let_go(self, error: GradientSyncError) -> None:
        """Forgets what was under way; a pass that goes on raises this error."""

    def begin_anew(self, passes: int, iteration: int) -> None:
        """Takes over what the ranks have in common, in the order of the models; may communicate.

        Args:
            passes: number of passes that ended well on all ranks.
            iteration: the most that the hook's state counts on any rank.
        """


class Recovery:
    """Brings the ranks of a group together after a pass of which a communication hook failed.

    Made by :meth:`of`. All models over the group share it, and are told when the ranks have met.

    Attributes:
        owed: this rank's report of a pass that it left early, where others wait to meet, or may.
        ended: number of synchronised passes that ended, well or not, or did not begin for an error.
        left_out: how many have to have ended before the next one may begin.

    Args:
        settings: of the first model.
    """

    def __init__(self, settings: Settings) -> None:
        self._group_reference = weakref.ref(settings.group)
        self._generation = settings.group.generation
        self._device = settings.device
        self._models: dict[int, weakref.ref[Model]] = {}
        self._made = 0
        self._others = _OtherGroups(settings.group, deferred=settings.group.is_stream_ordered(self._device))
        self._lock = threading.Lock()
        self._meets = False
        self._failure: GroupAbortedError | None = None
        self._why: list[str] = []
        self.owed: ErrorReport | None = None
        self.ended = self.left_out = 0
        self._told = GradientSyncError()

    @classmethod
    def of(cls, settings: Settings, model: Model) -> Recovery:
        """Returns that of a model's group; the model takes part in meetings from now on.

        Ranks count passes and models from the same moment on: when the group was made, or has last taken
        other members, which know nothing of the time before.
        """
        recovery = _recoveries.get(settings.group)
        if recovery is None or recovery._generation != settings.group.generation:
            recovery = _recoveries[settings.group] = cls(settings)
        recovery._models[recovery._made] = weakref.ref(model)
        recovery._made += 1
        return recovery

    @property
    def _group(self) -> ProcessGroup:
        group = self._group_reference()
        if group is None:
            raise ReferenceError("the models of this group have gone")
        return group

    # ---- passes ------------------------------------------------------------------------------------------

    def begin_pass(self, *, by_hook: bool) -> None:
        """Takes note that a synchronised pass begins.

        Args:
            by_hook: whether a hook reduces, which may use other groups.
        """
        self._others.begin_pass(by_hook=by_hook)
        if by_hook and self._others:
            _watch.add(self)

    def end_pass(self) -> None:
        """Takes note that a synchronised pass ends."""
        self._others.end_pass()

    def look(self) -> None:
        """Frees this rank where it waits in another group after another rank broke off; any thread."""
        group = self._group_reference()
        if group is None or not self._others.may_wait:
            return
        with self._lock:
            cause = None if self._meets else _by_hook(group._find_cause())
            if cause is not None:
                self._spread(cause)

    @property
    def is_needed(self) -> bool:
        """Whether a model lives."""
        return any(True for _ in self._live())

    @property
    def pass_seconds(self) -> float:
        """How long this rank may have waited by now."""
        return time.monotonic() - self._others.began if self._others.may_wait else 0.0

    # ---- failures ----------------------------------------------------------------------------------------

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
        text = f"rank {rank} of {self._group.describe()} {_BROKE_OFF}: {why}: {cause}"
        number = self.ended + 1
        self._failure = GroupAbortedError(text, rank, operation=_BROKEN_BY_HOOK, sequence=number, cause=cause)
        self._why.append(f"{why}: {cause}")
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

    def owe(self, report: ErrorReport) -> None:
        """Takes note that this rank leaves a pass before it knows how that ends."""
        self._break_off()
        self.owed = replace(report, cause=None)  # whose frames hold buckets, and what users raise it over

    def leave(self, settings: Settings, report: ErrorReport, note: str = "") -> GradientSyncError:
        """Returns what this rank can tell alone of a pass that broke off; the ranks meet before the next one.

        Args:
            settings: of the model whose pass it is.
            report: what went wrong on this rank.
            note: what else there is to say.
        """
        error = self._tell_alone(settings, report, note)
        for _, model in self._live():
            model.let_go(error)
        return error

    def _tell_alone(self, settings: Settings, report: ErrorReport, note: str = "") -> GradientSyncError:
        self.owe(report)
        cause, rank = self._cause(), self._group.rank()
        if cause is not None and not report:
            rank, report = cause.rank, ErrorReport(errors=[str(cause)])
            report.advice += [_USED] if 0 <= cause.sequence <= self.ended else []
        report.errors += [note] if note else []
        return sync_error(settings, {rank: report.encode()})

    def explain_last(self, settings: Settings, error: DistError) -> DistError:
        """Returns what to raise for an error of passes after which the ranks do not meet again."""
        if isinstance(error, GradientSyncError) or not self.is_broken_off():
            return error
        return self._tell_alone(settings, ErrorReport())

    def check_next(self) -> None:
        """Raises where other ranks have left out the pass that is about to begin.

        Raises:
            GradientSyncError: they did.
        """
        self._others.touched = time.monotonic()
        if self.ended < self.left_out:
            self.ended += 1
            why = "This pass is left out, too, because other ranks learned of that here or later."
            raise GradientSyncError(f"{self._told}\n{why}", self._told.reasons)

    # ---- the meeting -------------------------------------------------------------------------------------

    def meet(self, settings: Settings, report: ErrorReport, *, after: bool) -> GradientSyncError:
        """Connects the groups anew; called by all ranks, blocks. All models begin anew.

        Args:
            settings: of the model whose pass brings this rank here.
            report: what went wrong on this rank.
            after: whether this rank has left the pass; else it is within the one in which it raises.

        Returns:
            The error that all ranks raise.

        Raises:
            DistError: a rank has died, or does not come.
        """
        report.errors += [why for why in self._why if why not in report.errors]
        self._why = []
        try:
            self._group._renew(self._break_off)
        except UnsupportedOperationError as error:
            return self.leave(settings, report, f"{error}; make a new group")
        with self._lock:
            self._meets = True
        try:
            return self._exchange(settings, report, self.ended if after else self.ended + 1)
        finally:
            self._meets = False

    def _exchange(self, settings: Settings, report: ErrorReport, number: int) -> GradientSyncError:
        self._failure = self.owed = None
        models = {str(place): model for place, model in self._live()}
        mine = {
            "groups": list(self._others.known()),
            "used": [_key(group) for group in self._others.used()],
            "models": {place: [model.passes, model.iteration()] for place, model in models.items()},
            "pass": number,
        }
        records = gather_records(self._group, mine, self._device)
        self._renew_others(records, report)
        common = [place for place in models if all(place in record["models"] for record in records)]
        if self._group.is_stream_ordered(self._device):
            self.left_out = max(record["pass"] for record in records)
            # Ranks that raised in later passes, or do not know of earlier errors yet, used what came of them.
            good = [sum(record["models"][place][0] for place in common) for record in records]
            bad = {record["pass"] - passes for record, passes in zip(records, good, strict=True)}
            if len({record["pass"] for record in records}) > 1 or len(bad) > 1:
                report.advice.append(_USED)
        error = ReportExchange(settings, report, self._device).error()
        self._told = GradientSyncError(str(error), error.reasons)  # without frames, which hold the group
        for model in models.values():
            model.let_go(error)
        for place in common:  # a rank may have given others up
            passes, iterations = zip(*(record["models"][place] for record in records), strict=True)
            models[place].begin_anew(min(passes), max(iterations))
        return error

    def _renew_others(self, records: Sequence[Mapping[str, Any]], report: ErrorReport) -> None:
        """Connects those other groups anew that a rank used and all of their ranks have."""
        by_rank = dict(zip(self._group.global_ranks, records, strict=True))
        used = {key for record in records for key in record["used"]}
        for key, other in sorted(self._others.known().items()):
            members = [by_rank.get(member) for member in other.global_ranks]
            if key in used and all(record is not None and key in record["groups"] for record in members):
                try:
                    other._renew()
                except UnsupportedOperationError as error:
                    report.advice.append(f"{error}; make a new group")
        self._others.forget()

    # ---- inside ------------------------------------------------------------------------------------------

    def _live(self) -> Iterator[tuple[int, Model]]:
        for place, reference in list(self._models.items()):
            model = reference()
            if model is None:
                self._models.pop(place, None)
            else:
                yield place, model

    def _break_off(self) -> None:
        """Lets all that is in flight fail, and the other ranks know, where this one's hook failed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._group._break_for(failure)
        if (cause := failure or self._cause()) is not None:
            self._spread(cause)

    def _spread(self, cause: GroupAbortedError) -> None:
        """Breaks the other groups that this rank may wait in for one whose hook failed."""
        for other in self._others.used():
            if other._first_cause() is None:
                other._break_for(_in_numbers_of(other, self._group, cause))

    def _cause(self) -> GroupAbortedError | None:
        """Returns what broke the first group that a hook's failure broke, with ranks of the model's group."""
        if (cause := _by_hook(self._group._first_cause())) is not None:
            return cause
        for other in self._others.used():
            if (cause := _by_hook(other._first_cause())) is not None:
                return _in_numbers_of(self._group, other, cause)
        return None


_recoveries: weakref.WeakKeyDictionary[ProcessGroup, Recovery] = weakref.WeakKeyDictionary()


def _by_hook(cause: DistError | None) -> GroupAbortedError | None:
    """Returns what broke a group where that was the failure of a hook."""
    if isinstance(cause, GroupAbortedError) and cause.operation == _BROKEN_BY_HOOK:
        return cause
    return None


def _in_numbers_of(group: ProcessGroup, other: ProcessGroup, cause: GroupAbortedError) -> GroupAbortedError:
    """Returns what broke another group with the number of its rank in this one; -1 where it has none."""
    member = other.global_ranks[cause.rank] if cause.rank >= 0 else -1
    rank = group.global_ranks.index(member) if member in group.global_ranks else -1
    return GroupAbortedError(cause.args[0], **{**cause.details(), "rank": rank}, cause=cause.cause)


def _key(group: ProcessGroup) -> str:
    """Returns what tells a group on all of its ranks, also from one of an earlier world."""
    return f"{group.group_name} of {','.join(map(str, group.global_ranks))}"


class _OtherGroups:
    """The groups of some ranks of a model that its hooks may use besides the model's own.

    What hooks use shows in what is issued, wherever they keep the group. A group with a model of its own that
    trained meanwhile is left to that.

    Attributes:
        began: when the pass began.
        touched: when a model of the group last communicated.

    Args:
        group: the model's.
        deferred: whether passes end without waiting, so that one of long ago may have failed.
    """

    def __init__(self, group: ProcessGroup, *, deferred: bool) -> None:
        self._group = weakref.ref(group)
        self._deferred = deferred
        self._passes = 0
        self._found: dict[str, weakref.ref[ProcessGroup]] = {}
        self._number_found = -1
        self._counts: dict[str, int] | None = None
        self.began = self.touched = 0.0

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass of a model of the group goes on."""
        return self._passes > 0

    @property
    def may_wait(self) -> bool:
        """Whether this rank or its device may wait in one of the groups."""
        return self._counts is not None and (self.is_in_pass or self._deferred)

    def begin_pass(self, *, by_hook: bool) -> None:
        """Takes note of what was issued before."""
        self._passes += 1
        if by_hook and (self._counts is None or (self._passes == 1 and not self._deferred)):
            self.began = time.monotonic()
            self._counts = {key: group._number_begun() for key, group in self.known().items()}

    def end_pass(self) -> None:
        """Takes note that a pass has ended."""
        self._passes -= 1
        self.touched = time.monotonic()

    def forget(self) -> None:
        """Forgets what was issued so far."""
        self._counts = None

    def known(self) -> dict[str, ProcessGroup]:
        """Returns the groups by keys; the last one made by that key, as others have ended."""
        changes = dump.groups.changes
        if changes != self._number_found:
            self._number_found = changes
            own = self._group()
            members = set() if own is None else set(own.global_ranks)
            self._found = {
                _key(group): weakref.ref(group)
                for group in outer_groups()
                if group is not own and group.size() > 1 and members.issuperset(group.global_ranks)
            }
        found = {key: reference() for key, reference in self._found.items()}
        return {key: group for key, group in found.items() if group is not None}

    def __bool__(self) -> bool:
        return bool(self._found)

    def used(self) -> list[ProcessGroup]:
        """Returns those to which something was issued since the pass began."""
        if self._counts is None:
            return []
        return [
            group
            for key, group in self.known().items()
            if group._number_begun() > self._counts.get(key, 0) and not self._trains(group)
        ]

    def _trains(self, group: ProcessGroup) -> bool:
        """Returns whether a model over that group has communicated since the pass began."""
        recovery = _recoveries.get(group)
        return recovery is not None and (
            recovery._others.is_in_pass or recovery._others.touched >= self.began
        )


class _Watch:
    """Looks at passes that last long, from a thread that lives as long as models with such hooks."""

    def __init__(self) -> None:
        self._recoveries: weakref.WeakSet[Recovery] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, recovery: Recovery) -> None:
        """Has the passes of a group's models looked at."""
        thread = self._thread
        if recovery in self._recoveries and thread is not None and thread.is_alive():
            return
        with self._lock, contextlib.suppress(DistBackendError):  # then time limits remain
            self._recoveries.add(recovery)
            if self._thread is None or not self._thread.is_alive():
                self._thread = start_thread(self._run, "hooks")

    def _run(self) -> None:
        looked: weakref.WeakKeyDictionary[Recovery, float] = weakref.WeakKeyDictionary()
        while True:
            time.sleep(_TICK_S)
            with self._lock:
                watched = list(self._recoveries)
                if not watched:
                    self._thread = None
                    return
            for recovery in watched:
                if not recovery.is_needed:
                    self._recoveries.discard(recovery)
                seconds = recovery.pass_seconds
                before = looked.get(recovery, 0.0)
                if seconds < before:
                    before = looked[recovery] = 0.0
                if seconds >= max(_TICK_S, before + min(before, _LONGEST_S)):
                    looked[recovery] = seconds
                    with contextlib.suppress(Exception):  # of a group that ends meanwhile
                        recovery.look()
            watched.clear()
            del recovery


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]
