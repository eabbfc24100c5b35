"""Consensus at the end of a synchronised pass: averaged gradients on all ranks, or one error on all of them.

A rank with an error takes part in every reduction all the same and tells the others by its signals
(:mod:`collectives.ddp.sync.signals`); where one of them did, all ranks exchange their reports
(:mod:`collectives.ddp.sync.error_report`).

To read the signals of a device is to wait for it. *Deferred*, they are read before a later pass, as soon as
they are there: then a rank with an error raises it alone at the end of its pass, and the others learn which
rank that was. Those of the last pass are read when the group is shut down, or else when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from collectives import DistError, GroupAbortedError, Work
from collectives.core.host_copies import HostCopy
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.reducer.averaging import Averager
from collectives.ddp.reducer.backward_pass import BackwardPass, Progress
from collectives.ddp.reducer.bucket_order import OrderTrace
from collectives.ddp.sync.error_report import ErrorReport, ReportExchange, late_error, sync_error
from collectives.ddp.sync.signals import ReducedSignals, Signals
from collectives.ddp.unused_parameters.tracker import UnusedParameters
from collectives.logs import Log

__all__ = ["Consensus"]


_log = Log(__name__)

_EXIT_SECONDS = 10.0
"""How long the end of the process waits for the last passes of all models."""
_POLL_SECONDS = 0.01


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


class Consensus:
    """What the ranks tell each other about their passes.

    Attributes:
        is_local: whether nothing communicates, so that this rank reads its own signals only.
        progress: what this rank did since the last synchronised pass.

    Args:
        averager: averages over the ranks.
        model: the model in words, for messages.
        unused: which parameters this rank uses.
        order: the order of their gradients.
        device: device of tensors that the group takes.
        deferred: whether signals may be read before the next pass.
        explain: returns what to raise for an error after the last pass.
    """

    def __init__(
        self,
        averager: Averager,
        model: str,
        unused: UnusedParameters,
        order: OrderTrace,
        device: torch.device,
        deferred: bool,
        explain: Callable[[DistError], DistError],
    ) -> None:
        self._averager = averager
        self._model = model
        self._unused = unused
        self._order = order
        self._device = device
        self._deferred = deferred
        self._explain = explain
        self._late: deque[_LatePass] = deque()
        self._waits = False
        self._relayout = False
        self._out_of_step: ErrorReport | None = None
        self.is_local = False
        self.progress = Progress()
        self._tail: torch.Tensor | None = None  # where the buckets cannot carry the signals
        self._work: Work | None = None
        self._abandoned: list[Work | ReportExchange] = []
        self._signals = self._new_signals()
        if deferred:
            averager.group.check_before_shutdown(self.check_last)
            _check_at_exit(self)

    def _new_signals(self) -> Signals:
        counted = self._unused.find_unused or self._unused.static
        group = self._averager.group
        own = (group.size(), group.rank()) if self._deferred else (1, 0)
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
        self._tail = torch.zeros(self._signals.size, device=self._device)

    # ---- what a pass does --------------------------------------------------------------------------------

    def write_signals(self, current: BackwardPass, tail: torch.Tensor) -> None:
        """Writes this rank's signals."""
        self._signals.write(
            tail,
            error=bool(current.report),
            relayout=self._order.requests_relayout,
            waits=self._waits or not self._deferred,
            position=current.position(self.progress),
            used=self._unused.local_used_map(current.counts),
            captured=self._averager.group.is_capturing(tail.device),
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
        if not self._deferred:
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
                f"[rank {self._averager.group.rank()}] {self._model} cannot be captured into a CUDA graph: "
                f"{reason}; run this pass without a graph"
            )

    def defers(self, current: BackwardPass) -> bool:
        """Returns whether the signals of a pass are read before the next one."""
        return not self.is_local and not current.joining and self.why_not_deferred() is None

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
        group = self._averager.group
        if self.is_local or tail is None:
            signals = self._signals.local(self._unused.used if self._unused.is_reported else ())
        else:
            if self._tail is not None and self._work is not None:
                self._work.wait()
                tail = self._tail
            if self.defers(current):
                signals = self._read_later(current, tail)
            else:
                signals = self._signals.read(group.to_host(tail))
                if signals.errors or signals.out_of_step:
                    raise self._error_of_all(current.report, signals, current) from current.cause
        if current.report:  # only this rank knows: nothing communicates, or the signals are gone or deferred
            report = {group.rank(): current.report.encode()}
            raise sync_error(group, self._model, report) from current.cause
        return signals

    def _error_of_all(
        self, report: ErrorReport, signals: ReducedSignals, current: BackwardPass
    ) -> GradientSyncError:
        """Returns the error that all ranks raise, from the reports of all of them; blocks."""
        if signals.out_of_step and not current.shadow:
            report.position = str(current.position(self.progress))
        return ReportExchange(self._averager.group, report, self._device).error(self._model)

    def _read_later(self, current: BackwardPass, tail: torch.Tensor) -> ReducedSignals:
        """Begins to read the signals for :meth:`settle`; returns those of a pass that ended well.

        A rank with an error raises that, and has nothing to settle.
        """
        if not current.report:
            copy = self._averager.group.to_host_later(tail)
            report = ErrorReport(position=str(current.position(self.progress)))
            self._late.append(_LatePass(copy, self._signals.read, report))
        return ReducedSignals()

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
        if not self._late or self._averager.group.is_capturing(self._device):
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
            raise ReportExchange(self._averager.group, report, self._device).error(self._model)
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
            raise late_error(self._averager.group, self._model, which, signals.errors, late.report)
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
            raise self._explain(error) from error.__cause__
        if self._out_of_step is not None:
            report, self._out_of_step = self._out_of_step, None
            which = "one of the last backward passes"
            raise late_error(self._averager.group, self._model, which, (), report)

    def check_at_exit(self, until: float) -> None:
        """Logs what went wrong in passes that no other followed; does not raise.

        Args:
            until: when it no longer waits for these to end, on the monotonic clock.
        """
        log = _log.of(self._averager.group)
        try:
            while self._late and not self._late[-1].copy.done():
                if time.monotonic() >= until:
                    log.error(
                        "the process ends before the last backward pass of %s: its gradients were not "
                        "averaged, as far as this rank knows, and parameters that an optimizer made of them "
                        "are this rank's alone",
                        self._model,
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
        self._abandoned.clear()
        self._waits = self._relayout = False
        self._out_of_step = self._work = None
        self.progress = Progress()
        self.send_separately()  # what is in flight may yet be written to the tail before

    def abandon(self, current: BackwardPass) -> None:
        """Sends signals and report of a pass that broke off here, without waiting."""
        self.send_signals(current)
        if self._work is not None:
            self._abandoned.append(self._work)
        if not self.defers(current):
            self._abandoned.append(ReportExchange(self._averager.group, current.report, self._device))

    def wait_for_abandoned(self) -> None:
        """Waits for what an abandoned pass has issued; its error was raised then."""
        abandoned, self._abandoned = self._abandoned, []
        for exchange in abandoned:
            with contextlib.suppress(Exception):
                exchange.wait()


_deferring: weakref.WeakSet[Consensus] = weakref.WeakSet()
_process = 0
"""The process in which the end is watched; a child that is forked inherits the function and no pass."""


def _check_at_exit(consensus: Consensus) -> None:
    """Has the last passes checked when the process ends, before what watches their groups does."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _deferring.clear()
        atexit.register(_check_all)
    _deferring.add(consensus)


def _check_all() -> None:
    until = time.monotonic() + _EXIT_SECONDS
    for consensus in list(_deferring) if _process == os.getpid() else ():
        consensus.check_at_exit(until)
