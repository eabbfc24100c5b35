"""Consensus at the end of a synchronised pass: averaged gradients on all ranks, or one error on all of them.

A rank with an error takes part in every reduction all the same and tells the others by its signals
(:mod:`collectives.ddp.sync.signals`); where one of them did, all ranks exchange their reports
(:mod:`collectives.ddp.sync.error_report`).
"""

from __future__ import annotations

import contextlib

import torch

from collectives import Work
from collectives.ddp.reducer.averaging import Averager
from collectives.ddp.reducer.backward_pass import BackwardPass, Progress
from collectives.ddp.reducer.bucket_order import OrderTrace
from collectives.ddp.sync.error_report import ReportExchange, sync_error
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
    """

    def __init__(
        self,
        averager: Averager,
        model: str,
        unused: UnusedParameters,
        order: OrderTrace,
        device: torch.device,
    ) -> None:
        self._averager = averager
        self._model = model
        self._unused = unused
        self._order = order
        self._device = device
        self.is_local = False
        self.progress = Progress()
        self._tail: torch.Tensor | None = None  # where the buckets cannot carry the signals
        self._work: Work | None = None
        self._abandoned: list[Work | ReportExchange] = []
        self._signals = self._new_signals()

    def _new_signals(self) -> Signals:
        counted = self._unused.find_unused or self._unused.static
        return Signals(len(self._unused.used) if counted else 0)

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
        )

    def send_signals(self, current: BackwardPass) -> None:
        """Sends the signals where they go separately; called after the launch of all buckets."""
        if self._tail is not None:
            self.write_signals(current, self._tail)
            self._work = self._averager.start([self._tail])

    def read_signals(self, current: BackwardPass, tail: torch.Tensor | None) -> ReducedSignals:
        """Returns what the ranks signalled; blocks until that is here.

        Args:
            current: the pass.
            tail: of the last bucket, after its reduction.

        Raises:
            GradientSyncError: something went wrong on a rank; raised on all ranks.
            DistError: the group broke, so that there are no averages.
        """
        group = self._averager.group
        if self.is_local or tail is None:
            signals = self._signals.local(self._unused.used if self._unused.is_reported else ())
        else:
            if self._tail is not None and self._work is not None:
                self._work.wait()
                tail = self._tail
            signals = self._signals.read(group.to_host(tail))
        if signals.out_of_step and not current.shadow:
            current.report.position = str(current.position(self.progress))
        if signals.error or signals.out_of_step:
            error = ReportExchange(group, current.report, self._device).error(self._model)
            raise error from current.cause
        if current.report:  # only this rank knows: nothing communicates, or the signals had left already
            report = {group.rank(): current.report.encode()}
            raise sync_error(group, self._model, report) from current.cause
        return signals

    def abandon(self, current: BackwardPass) -> None:
        """Sends signals and report of a pass that broke off here, without waiting."""
        self.send_signals(current)
        if self._work is not None:
            self._abandoned.append(self._work)
        self._abandoned.append(ReportExchange(self._averager.group, current.report, self._device))

    def wait_for_abandoned(self) -> None:
        """Waits for what an abandoned pass has issued; its error was raised then."""
        abandoned, self._abandoned = self._abandoned, []
        for exchange in abandoned:
            with contextlib.suppress(Exception):
                exchange.wait()
