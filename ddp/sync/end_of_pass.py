"""Consensus at the end of a synchronised pass: averaged gradients on all ranks, or one error on all of them.

A rank with an error takes part in every reduction all the same and tells the others by its signals
(:mod:`collectives.ddp.sync.signals`); where one of them did, all ranks exchange their reports
(:mod:`collectives.ddp.sync.error_report`).

To read the signals of a device is to wait for it. *Deferred*, they are read before the next pass: then a rank
with an error raises it alone at the end of its pass, and the others learn which rank that was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from collectives import Work
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.reducer.averaging import Averager
from collectives.ddp.reducer.backward_pass import BackwardPass, Progress
from collectives.ddp.reducer.bucket_order import OrderTrace
from collectives.ddp.sync.error_report import ErrorReport, ReportExchange, late_error, sync_error
from collectives.ddp.sync.signals import ReducedSignals, Signals
from collectives.ddp.unused_parameters.tracker import UnusedParameters

__all__ = ["Consensus"]


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
    """

    def __init__(
        self,
        averager: Averager,
        model: str,
        unused: UnusedParameters,
        order: OrderTrace,
        device: torch.device,
        deferred: bool,
    ) -> None:
        self._averager = averager
        self._model = model
        self._unused = unused
        self._order = order
        self._device = device
        self._deferred = deferred
        self._late: list[Callable[[], ReducedSignals]] = []
        self.is_local = False
        self.progress = Progress()
        self._tail: torch.Tensor | None = None  # where the buckets cannot carry the signals
        self._work: Work | None = None
        self._abandoned: list[Work | ReportExchange] = []
        self._signals = self._new_signals()

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
        if current.report:
            return ReducedSignals()
        finish, read = self._averager.group.to_host_later(tail), self._signals.read
        report = ErrorReport(position=str(current.position(self.progress)))
        group = self._averager.group

        def settle() -> ReducedSignals:
            signals = read(finish())
            if signals.errors:
                raise late_error(group, self._model, signals.errors)
            if signals.out_of_step:
                raise ReportExchange(group, report, self._device).error(self._model)
            return signals

        self._late.append(settle)
        return ReducedSignals()

    def settle(self) -> bool:
        """Raises what is wrong with the pass before; returns whether a rank then asked for another layout.

        Called before each synchronised pass, on all ranks. Blocks until the signals of that pass are here.
        While a CUDA graph is captured, nothing can be read, and the next pass that is not settles all; those
        of passes in a graph are the ones of its last replay.

        Raises:
            GradientSyncError: something went wrong on a rank in the pass before.
            DistError: the group broke in it, so that there were no averages.
        """
        if not self._late or self._averager.group.is_capturing(self._device):
            return False
        late, self._late = self._late, []
        passes = [settle() for settle in late]
        return any(signals.relayout for signals in passes)

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
