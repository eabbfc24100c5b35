"""The end of a synchronised pass, the same on all ranks: averaged gradients, or one error.

A rank in trouble takes part in every reduction all the same and says so by its signals
(:mod:`collectives.ddp.sync.signals`); where one of them did, all ranks exchange their reports
(:mod:`collectives.ddp.sync.error_report`).
"""

from __future__ import annotations

import contextlib

import torch

from collectives.ddp.reducer.averaging import Averager
from collectives.ddp.reducer.order import OrderTrace
from collectives.ddp.reducer.passes import Pass, Progress
from collectives.ddp.sync.error_report import ReportExchange, sync_error
from collectives.ddp.sync.signals import Heard, SignalExchange, Signals
from collectives.ddp.unused_parameters.usage import Usage

__all__ = ["Consensus"]


class Consensus:
    """What the ranks tell each other about their passes.

    Attributes:
        is_local: whether nothing communicates, so that this rank hears itself only.
        progress: what this rank did since the last synchronised pass.

    Args:
        averager: averages over the ranks.
        model: the model in words, for messages.
        usage: what this rank uses of the parameters.
        order: the order of their gradients.
        device: device of tensors that the group takes.
    """

    def __init__(
        self, averager: Averager, model: str, usage: Usage, order: OrderTrace, device: torch.device
    ) -> None:
        self._averager = averager
        self._model = model
        self._usage = usage
        self._order = order
        self._device = device
        self.is_local = False
        self.progress = Progress()
        self._exchange: SignalExchange | None = None  # where the buckets cannot carry the signals
        self._stale: list[SignalExchange | ReportExchange] = []
        self._signals = self._new_signals()

    def _new_signals(self) -> Signals:
        counted = self._usage.find_unused or self._usage.static
        return Signals(len(self._usage.used) if counted else 0)

    @property
    def tail_size(self) -> int:
        """Number of elements of the tail that carries the signals."""
        return self._signals.size

    def resize(self) -> None:
        """Adapts the tail to what the ranks now tell each other about their usage."""
        self._signals = self._new_signals()
        if self._exchange is not None:
            self.send_apart()

    def send_apart(self) -> None:
        """Sends the signals in a message of their own from now on, and not with the last bucket."""
        self._exchange = SignalExchange(self._averager, self._signals, self._device)

    # ---- what a pass does --------------------------------------------------------------------------------

    def fill_tail(self, current: Pass, tail: torch.Tensor) -> None:
        """Writes this rank's signals."""
        self._signals.fill(
            tail,
            trouble=bool(current.report),
            wish=self._order.wish,
            position=current.position(self.progress),
            used=self._usage.tell(current.counts),
        )

    def start(self, current: Pass) -> None:
        """Sends the signals where they go apart; called after the launch of all buckets."""
        if self._exchange is not None:
            self.fill_tail(current, self._exchange.tail)
            self._exchange.start()

    def hear(self, current: Pass, tail: torch.Tensor | None) -> Heard:
        """Returns what the ranks signalled; blocks where the signals went apart.

        Args:
            current: the pass.
            tail: of the last bucket, which came back.

        Raises:
            GradientSyncError: a rank is in trouble; raised on all ranks.
        """
        if self.is_local or tail is None:
            heard = self._signals.alone(self._usage.used if self._usage.is_told else ())
        else:
            if self._exchange is not None:
                self._exchange.wait()
                tail = self._exchange.tail
            heard = self._signals.read(tail)
        group = self._averager.group
        if heard.out_of_step and not current.follows:
            current.report.position = str(current.position(self.progress))
        if heard.trouble or heard.out_of_step:
            error = ReportExchange(group, current.report, self._device).error(self._model)
            raise error from current.cause
        if current.report:  # only this rank knows: nothing communicates, or the signals had left already
            report = {group.rank(): current.report.encode()}
            raise sync_error(group, self._model, report) from current.cause
        return heard

    def abandon(self, current: Pass) -> None:
        """Sends signals and report of a pass that broke off here, without waiting."""
        self.start(current)
        if self._exchange is not None:
            self._stale.append(self._exchange)
        self._stale.append(ReportExchange(self._averager.group, current.report, self._device))

    def settle(self) -> None:
        """Waits for what a pass that broke off has issued; its error was raised then."""
        stale, self._stale = self._stale, []
        for item in stale:
            with contextlib.suppress(Exception):
                item.wait()
