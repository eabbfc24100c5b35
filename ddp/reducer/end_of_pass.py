"""What ranks tell each other at the end of a synchronised pass: averages for all, or one error for all.

A rank with an error takes part in every reduction all the same, so that no peer waits for it, and tells the
others by *signals*: numbers in the *tail* of the last bucket, so that they cost no message of their own.
Where no signal of an error is up, which costs nothing to find out, the pass is good on all ranks. Where one
is, all ranks exchange their *reports* and raise the same error.

A signal is zero on a rank that has nothing to report. Only whether the average is zero is looked at, which
any floating type, any reduction and any number of ranks leaves exact. A value that the ranks must have in
common has several signals, one for each value: each rank raises its own, and where two of them are up, the
ranks differ.

To read the signals of a device is to wait for it. *Deferred*, they are read before a later pass, as soon as
they are there: then a rank with an error raises it alone at the end of its pass, and the others learn which
rank that was. Those of the last pass are read when the group is shut down, or else when the process ends.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from collectives import DistError, GroupAbortedError, Work
from collectives.core.backend_interface import HostCopy
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.module.arguments import Settings
from collectives.ddp.reducer.averaging import Averager
from collectives.ddp.reducer.backward_pass import (
    OUT_OF_STEP,
    REPORT_BYTES,
    BackwardPass,
    ErrorReport,
    Position,
    Progress,
)
from collectives.ddp.reducer.buckets import OrderTrace
from collectives.ddp.reducer.unused import UnusedParameters
from collectives.logs import Log

_log = Log(__name__)

_EXIT_SECONDS = 10.0
"""How long the end of the process waits for the last passes of all models."""
_POLL_SECONDS = 0.01


# ---- signals -----------------------------------------------------------------------------------------------

_RELAYOUT = 0
_GOES_ON = 1
"""Raised by a rank whose host does not wait for the end of its passes."""

_MODULI = (4, 5, 7)
"""A number is signalled by its remainders: two that differ by less than the product differ in one."""

_GROUPS = (*_MODULI, *_MODULI, 2)
"""Number of signals for each part of a :class:`Position`."""

*_BEGINS, _FIRST_ERROR = accumulate(_GROUPS, initial=2)
"""The first signal of each of these groups; behind them come those of errors."""


@dataclass
class ReducedSignals:
    """What the ranks signalled.

    Attributes:
        errors: where something went wrong: the ranks, or just 0 where they share one signal for it.
        out_of_step: whether the ranks stand at different positions.
        relayout: whether a rank requests another layout of the buckets.
        all_wait: whether the hosts of all ranks wait for the end of each pass.
        unused: indices of the parameters that no rank gave a gradient, where that is reported.
    """

    errors: Sequence[int] = ()
    out_of_step: bool = False
    relayout: bool = False
    all_wait: bool = False
    unused: frozenset[int] = field(default_factory=frozenset)


def _raised_by(position: Position) -> Iterator[int]:
    """Yields the places of the signals that stand for a position."""
    forwards, unsynced = [position.forwards] * len(_MODULI), [position.unsynced] * len(_MODULI)
    values = (*forwards, *unsynced, position.repeated)
    for begin, width, value in zip(_BEGINS, _GROUPS, values, strict=True):
        yield begin + int(value) % width


class Signals:
    """The signals of one model, and how they lie in the tail.

    Attributes:
        size: number of elements of the tail.

    Args:
        counted: number of parameters whose use is reported; zero where all are used.
        ranks: number of signals for errors: one for each rank, or one that they share.
        rank: the one that this rank raises.
    """

    def __init__(self, counted: int, ranks: int = 1, rank: int = 0) -> None:
        self._first_used = _FIRST_ERROR + ranks
        self.size = self._first_used + counted
        self._counted = counted
        self._error = _FIRST_ERROR + rank
        self._written: list[float] | None = None
        self._on_device = torch.empty(0)

    def write(
        self,
        tail: torch.Tensor,
        *,
        error: bool,
        relayout: bool,
        waits: bool,
        position: Position | None,
        used: Sequence[int] | None,
        captured: bool = False,
    ) -> None:
        """Writes this rank's signals; waits for a device only to tell of other unused parameters than before.

        Args:
            tail: where to; floating, flat.
            error: whether something went wrong on this rank.
            relayout: whether it requests another layout of the buckets.
            waits: whether its host waits for the end of each pass.
            position: where it stands; ``None`` where it is in step with any.
            used: for each parameter 1 where it took part on this rank, else 0; ``None`` where all did.
            captured: whether this becomes part of a CUDA graph, where no parameters may be unused.
        """
        header = [0.0] * self._first_used
        header[self._error] = float(error)
        header[_RELAYOUT] = float(relayout)
        header[_GOES_ON] = float(not waits)
        for place in () if position is None else _raised_by(position):
            header[place] = 1.0
        if self._counted:
            header += [1.0] * self._counted if used is None else map(float, used)
        kept = self._on_device
        kept_here = header == self._written and (kept.device, kept.dtype) == (tail.device, tail.dtype)
        if kept_here and not captured:
            tail.copy_(kept)
            return
        if not captured and (tail.device.type == "cpu" or (self._counted > 0 and used is not None)):
            tail.copy_(torch.tensor(header, dtype=torch.float32))
        else:  # all parameters are used, so that a few operations write all without a copy from the host
            tail.zero_()
            for place in range(self._first_used):
                if header[place]:
                    tail[place].fill_(1.0)
            if self._counted:
                tail[self._first_used :].fill_(1.0)
        if not captured:  # a graph must not read memory that is given back when other signals are kept
            self._on_device = tail.clone()  # passes mostly signal what they did before
            self._written = header

    def read(self, tail: torch.Tensor) -> ReducedSignals:
        """Returns what the ranks signalled.

        Args:
            tail: the average of all ranks' signals, on the CPU.
        """
        values = tail.tolist()
        used = values[self._first_used :]
        groups = (values[begin : begin + width] for begin, width in zip(_BEGINS, _GROUPS, strict=True))
        errors = values[_FIRST_ERROR : self._first_used]
        return ReducedSignals(
            errors=[rank for rank, value in enumerate(errors) if value != 0],
            out_of_step=any(sum(value != 0 for value in group) > 1 for group in groups),
            relayout=values[_RELAYOUT] != 0,
            all_wait=values[_GOES_ON] == 0,
            unused=frozenset(index for index, value in enumerate(used) if value == 0)
            if 0 in used
            else frozenset(),
        )


# ---- reports -----------------------------------------------------------------------------------------------


class ReportExchange:
    """The exchange of the ranks' reports, issued by all of them after the last reduction of a pass.

    Blocks only in :meth:`wait` and :meth:`error`.

    Args:
        settings: of the model.
        report: this rank's report; an empty one where nothing went wrong.
        device: of the tensors; ``None`` for the model's.
    """

    def __init__(self, settings: Settings, report: ErrorReport, device: torch.device | None = None) -> None:
        group, device = settings.group, device or settings.device
        self._settings = settings
        self._mine = torch.frombuffer(bytearray(report.encode()), dtype=torch.uint8).to(device)
        self._all = torch.empty(group.size(), REPORT_BYTES, dtype=torch.uint8, device=device)
        self.wait = group.all_gather_single(self._all, self._mine).wait

    def error(self) -> GradientSyncError:
        """Returns the error that every rank raises, from the reports of all; blocks until they are here."""
        self.wait()
        rows = self._settings.group.to_host(self._all)
        return sync_error(self._settings, {rank: row.numpy().tobytes() for rank, row in enumerate(rows)})


def sync_error(settings: Settings, reports: Mapping[int, bytes]) -> GradientSyncError:
    """Returns the error for encoded reports of some ranks; empty ones are left out."""
    reasons: dict[int, str] = {}
    advice: dict[str, None] = {}
    for rank, report in reports.items():
        reason, *ways_out = report.rstrip(b"\0").decode(errors="replace").split("\0")
        if reason:
            reasons[rank] = reason
            advice.update(dict.fromkeys(ways_out))
    head = (
        f"{settings.where()}: the gradients of this backward pass could not be averaged, because of "
        f"rank{'s' if len(reasons) > 1 else ''} {', '.join(map(str, reasons))}:"
    )
    lines = [head, *(f"  rank {rank}: {reason}" for rank, reason in reasons.items()), *advice]
    return GradientSyncError("\n".join(lines), reasons)


def _late_error(
    settings: Settings, which: str, ranks: Sequence[int], report: ErrorReport
) -> GradientSyncError:
    """Returns the error of ranks that learn of one after the pass.

    Args:
        settings: of the model.
        which: the pass in words.
        ranks: those that raised an error; none where the ranks were out of step.
        report: what this rank says of the pass.
    """
    if ranks:
        reasons = dict.fromkeys(ranks, "it raised an error at the end of that pass, which tells more")
        why = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}, where the error was raised"
    else:
        reasons = {settings.group.rank(): report.position}
        why = f"ranks that were out of step: this rank {report.position}, and others did not. {OUT_OF_STEP}"
    return GradientSyncError(
        f"{settings.where()}: the gradients of {which} were not averaged, because of "
        f"{why.removesuffix('.')}. What an optimizer made of them is wrong: load a checkpoint. "
        "Over a group whose waits block the host (blocking_wait of nccl), every rank raises the whole error "
        "at the end of its backward pass.",
        reasons,
    )


# ---- the end of a pass -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LatePass:
    """A pass whose signals were not read at its end.

    Attributes:
        copy: of the tail.
        read: returns the signals in it.
        report: what this rank says of the pass.
    """

    copy: HostCopy
    read: Callable[[torch.Tensor], ReducedSignals]
    report: ErrorReport


class EndOfPass:
    """What the ranks tell each other about their passes.

    Attributes:
        is_local: whether nothing communicates, so that this rank reads its own signals only.
        deferred: whether signals may be read before the next pass.
        progress: what this rank did since the last synchronised pass.

    Args:
        settings: of the model.
        averager: averages over the ranks.
        unused: which parameters this rank uses.
        order: the order of their gradients.
        explain: returns what to raise for an error of the last passes.
    """

    def __init__(
        self,
        settings: Settings,
        averager: Averager,
        unused: UnusedParameters,
        order: OrderTrace,
        explain: Callable[[Settings, DistError], DistError],
    ) -> None:
        self._settings = settings
        self._group = settings.group
        self._averager = averager
        self._unused = unused
        self._order = order
        self._explain = explain
        self.deferred = settings.group.is_stream_ordered(settings.device)
        self._late: deque[_LatePass] = deque()
        self._waits = False
        self._relayout = False
        self._out_of_step: ErrorReport | None = None
        self.is_local = False
        self.progress = Progress()
        self._tail: torch.Tensor | None = None  # where the buckets cannot carry the signals
        self._work: Work | None = None
        self._signals = self._new_signals()
        if self.deferred:
            self._group.check_before_shutdown(self.check_last)
            _check_at_exit(self)

    def _new_signals(self) -> Signals:
        counted = self._unused.find_unused or self._unused.static
        own = (self._group.size(), self._group.rank()) if self.deferred else (1, 0)
        return Signals(len(self._unused.used) if counted else 0, *own)

    @property
    def tail_size(self) -> int:
        """Number of elements of the tail that carries the signals."""
        return self._signals.size

    def resize(self) -> None:
        """Adapts the tail to what the ranks now tell each other about unused parameters."""
        self._signals = self._new_signals()
        if self._tail is not None:
            self.send_separately()

    def send_separately(self) -> None:
        """Sends the signals in a message of their own from now on, and not with the last bucket."""
        self._tail = torch.zeros(self._signals.size, device=self._settings.device)

    # ---- what a pass does --------------------------------------------------------------------------------

    def write_signals(self, current: BackwardPass, tail: torch.Tensor) -> None:
        """Writes this rank's signals."""
        self._signals.write(
            tail,
            error=bool(current.report),
            relayout=self._order.requests_relayout,
            waits=self._waits or not self.deferred,
            position=current.position(self.progress),
            used=self._unused.local_used_map(current.counts),
            captured=self._group.is_capturing(tail.device),
        )

    def send_signals(self, current: BackwardPass) -> None:
        """Sends the signals where they go separately; called after the launch of all buckets."""
        if self._tail is not None:
            self.write_signals(current, self._tail)
            self._work = self._averager.start([self._tail])

    def why_not_deferred(self) -> str | None:
        """Returns why signals are read at the end of a pass, ``None`` where they are read before the next.

        Ranks that count what they use need to know at the end of the pass. Equal on all ranks.
        """
        if not self.deferred:
            return "the waits of its group block the host"
        if self._unused.find_unused:
            return "find_unused_parameters reads on the host, at the end of a pass, what no rank used"
        if self._unused.is_reported:
            return "the first pass of a static graph reads on the host, at its end, what no rank used"
        return None

    def check_capture(self, *, joining: bool, sparse: bool) -> None:
        """Checks that a pass can become part of a CUDA graph, where nothing is read on the host.

        Args:
            joining: whether the ranks train within a Join.
            sparse: whether there are sparse gradients.

        Raises:
            RuntimeError: it cannot.
        """
        reason = self.why_not_deferred()
        if joining:
            reason = "join() communicates on the host before each pass"
        elif sparse:
            reason = "sparse gradients have sizes that the host must know"
        if reason is not None:
            raise RuntimeError(
                f"[rank {self._group.rank()}] {self._settings.model} cannot be captured into a CUDA graph: "
                f"{reason}; run this pass without a graph"
            )

    def defers(self, current: BackwardPass) -> bool:
        """Returns whether the signals of a pass are read before the next one."""
        return (
            not self.is_local and not (current.shadow or current.uneven) and self.why_not_deferred() is None
        )

    def read_signals(self, current: BackwardPass, tail: torch.Tensor | None) -> ReducedSignals:
        """Returns what the ranks signalled; blocks until that is here, unless it is deferred.

        Args:
            current: the pass.
            tail: of the last bucket, after its reduction.

        Raises:
            GradientSyncError: something went wrong on a rank; raised on all ranks, or where that is deferred,
                on that one.
            DistError: the group broke, so that there are no averages.
        """
        group, report = self._group, current.report
        if self.is_local or tail is None:
            used = self._unused.used if self._unused.is_reported else ()
            signals = ReducedSignals(unused=frozenset(index for index, value in enumerate(used) if not value))
        else:
            if self._tail is not None and self._work is not None:
                self._work.wait()
                tail = self._tail
            if not self.defers(current):
                signals = self._signals.read(group.to_host(tail))
                if signals.out_of_step and not current.shadow:
                    report.position = str(current.position(self.progress))
                if signals.errors or signals.out_of_step:
                    error = ReportExchange(self._settings, report).error()
                    raise error from report.cause
            else:  # a rank with an error raises that below, and has nothing to settle
                signals = ReducedSignals()
                if not report:
                    late = ErrorReport(position=str(current.position(self.progress)))
                    self._late.append(_LatePass(group.to_host_later(tail), self._signals.read, late))
        if report:  # only this rank knows: nothing communicates, or the signals are gone or deferred
            raise sync_error(self._settings, {group.rank(): report.encode()}) from report.cause
        return signals

    def settle(self, *, together: bool = False) -> bool:
        """Raises what is known to be wrong with earlier passes; returns whether to lay the buckets out again.

        Called before each synchronised pass, on all ranks. Does not block: what passes signalled is read when
        it is here, which may be some passes later, and earlier on one rank than on another.

        What the ranks have to do together, they do before the same pass. Where a rank reads that there is
        something to be done, its host waits for the end of each pass from then on, and signals so. Where all
        hosts have waited for a pass, they know that of each other, and act.

        While a CUDA graph is captured, nothing can be read, and the next pass that is not settles all; those
        of passes in a graph are the ones of its last replay.

        Args:
            together: whether all ranks have read all passes by now, as all of them say so here; then blocks.

        Raises:
            GradientSyncError: something went wrong on a rank in an earlier pass.
            DistError: the group broke in it, so that there were no averages.
        """
        if not self._late or self._group.is_capturing(self._settings.device):
            return False
        while self._late and (together or self._waits or self._late[0].copy.done()):
            ago = len(self._late)
            signals = self._read_oldest(
                "the backward pass before this forward"
                if ago == 1
                else f"the last backward pass but {ago - 1}"
            )
            together |= signals.all_wait
            self._waits |= signals.relayout or signals.out_of_step
        if not (together and self._waits):
            return False
        self._waits, relayout, report = False, self._relayout, self._out_of_step
        self._relayout, self._out_of_step = False, None
        if report is not None:
            raise ReportExchange(self._settings, report).error()
        return relayout

    def _read_oldest(self, which: str) -> ReducedSignals:
        """Returns what the oldest pass signalled that was not read; raises the error of a rank in it."""
        late = self._late.popleft()
        try:
            signals = late.read(late.copy.result())
        except DistError:
            self._late.clear()  # nothing was averaged in later ones, either
            raise
        if signals.errors:
            raise _late_error(self._settings, which, signals.errors, late.report)
        if signals.out_of_step:
            self._out_of_step = self._out_of_step or late.report
        self._relayout |= signals.relayout
        return signals

    def check_last(self) -> None:
        """Raises what went wrong in passes that no other followed; blocks until these have ended.

        Called before the group ends, on this rank whether or not on others.

        Raises:
            GradientSyncError: something went wrong on a rank.
            DistError: the group broke, so that there were no averages.
        """
        try:
            while self._late:
                self._read_oldest("one of the last backward passes")
        except DistError as error:
            raise self._explain(self._settings, error) from error.__cause__
        if self._out_of_step is not None:
            report, self._out_of_step = self._out_of_step, None
            which = "one of the last backward passes"
            raise _late_error(self._settings, which, (), report)

    def check_at_exit(self, until: float) -> None:
        """Logs what went wrong in passes that no other followed; does not raise.

        Args:
            until: when it no longer waits for these to end, on the monotonic clock.
        """
        log = _log.of(self._group)
        try:
            while self._late and not self._late[-1].copy.done():
                if time.monotonic() >= until:
                    log.error(
                        "the process ends before the last backward pass of %s: its gradients were not "
                        "averaged, as far as this rank knows, and parameters that an optimizer made of them "
                        "are this rank's alone",
                        self._settings.model,
                    )
                    return
                time.sleep(_POLL_SECONDS)
            self.check_last()
        except GroupAbortedError:
            pass  # as the user wanted
        except Exception as error:  # noqa: BLE001 - nobody is left to catch it
            log.error("at the end of the process: %s", error)

    def begin_anew(self) -> None:
        """Forgets what earlier passes left, after one that was broken off; all ranks do so."""
        self._late.clear()
        self._waits = self._relayout = False
        self._out_of_step = self._work = None
        self.progress = Progress()
        if self._tail is not None:
            self.send_separately()  # what is in flight may yet be written to the tail before

    def abandon(self, current: BackwardPass) -> list[Work | ReportExchange]:
        """Sends signals and report of a pass that broke off here, without waiting; returns what is to end."""
        self.send_signals(current)
        sent: list[Work | ReportExchange] = [] if self._work is None else [self._work]
        if not self.defers(current):
            sent.append(ReportExchange(self._settings, current.report))
        return sent


_deferring: weakref.WeakSet[EndOfPass] = weakref.WeakSet()
_process = 0
"""The process in which the end is watched; a child that is forked inherits the function and no pass."""


def _check_at_exit(end: EndOfPass) -> None:
    """Has the last passes checked when the process ends, before what watches their groups does."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _deferring.clear()
        atexit.register(_check_all)
    _deferring.add(end)


def _check_all() -> None:
    until = time.monotonic() + _EXIT_SECONDS
    for end in list(_deferring) if _process == os.getpid() else ():
        end.check_at_exit(until)
