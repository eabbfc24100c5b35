"""The intake of a synchronised pass: when a gradient goes to its bucket, and what stands for absent ones."""

from __future__ import annotations

import torch

from collectives.ddp.reducer.bucket_reducer import Launcher
from collectives.ddp.reducer.gradients import BadGradientError, Gradients
from collectives.ddp.reducer.passes import Pass
from collectives.ddp.unused_parameters.skipping import Skipping
from collectives.ddp.unused_parameters.usage import Usage

__all__ = ["Intake"]


class Intake:
    """Takes in the gradients of one synchronised pass after another.

    A gradient is taken once nothing more will come to it; what is wrong is added to the report of the pass,
    and the pass goes on, because the peers wait for all of its buckets.

    Args:
        gradients: the gradients and their buckets.
        launcher: launches full buckets.
        usage: how often gradients come.
        skipping: what no rank reaches; ``None`` where nothing is skipped.
    """

    def __init__(
        self, gradients: Gradients, launcher: Launcher, usage: Usage, skipping: Skipping | None
    ) -> None:
        self._gradients = gradients
        self._launcher = launcher
        self._usage = usage
        self._skipping = skipping

    def begin(self, current: Pass) -> None:
        """Takes what is known to be absent, and gradients that came before the pass was synchronised.

        Blocks where the ranks' walks over their graphs are not known yet.
        """
        self._skip_what_none_reaches(current)
        for index in self._usage.idle:
            if index not in current.skipped:
                self._collect_absent(current, index)
        for index, count in enumerate(current.counts):
            if count:
                self.gradient_came(current, index, count)

    def _skip_what_none_reaches(self, current: Pass) -> None:
        """Leaves out the buckets that no rank can fill; takes what this rank cannot reach as absent."""
        if self._skipping is None:
            return
        unreached, not_mine = self._skipping.unreached(current.forwards)
        current.skipped = self._launcher.skip(frozenset(unreached))
        current.absent |= current.skipped
        for index in not_mine:
            if index not in current.skipped and not self._usage.used[index]:
                self._collect_absent(current, index)

    def gradient_came(self, current: Pass, index: int, count: int) -> None:
        """Takes in that a gradient came for the ``count``-th time; launches buckets that are full by it."""
        current.came.append(index)
        if index in current.absent and self._skipping is not None and self._skipping.walks:
            current.report.errors.append(
                f"{self._gradients.names[index]} got a gradient, but nothing that forward returned depends "
                "on it, so that it was skipped; leave out skip_all_reduce_unused_params"
            )
            return
        expected = self._usage.expected
        if expected is None:
            return
        if count == expected[index]:
            self._take(current, index)
        else:
            self._usage.report_surplus(index, count, current.report)

    def _take(self, current: Pass, index: int) -> None:
        """Takes a gradient of which nothing more will come; launches its bucket where that is full now."""
        try:
            if torch.is_grad_enabled():  # backward(create_graph=True)
                with torch.no_grad():
                    self._gradients.came(index)
            else:
                self._gradients.came(index)
        except BadGradientError as error:
            current.report.errors.append(str(error))
        if self._launcher.mark_ready(index) and not current.ending:
            self._launcher.launch_full(current)

    def _collect_absent(self, current: Pass, index: int) -> None:
        current.absent.add(index)
        try:
            with torch.no_grad():
                self._gradients.collect_absent(index, silent=current.silent)
        except BadGradientError as error:
            current.report.errors.append(str(error))
        self._launcher.mark_ready(index)

    def complete(self, current: Pass) -> None:
        """Collects, at the end of a pass, what did not come, and reports what should not be absent."""
        counts, expected = current.counts, self._usage.expected
        if counts == expected:
            return
        for index, count in enumerate(counts):
            if expected is not None and count >= expected[index]:
                continue
            if index in current.absent:
                continue
            if count:
                self._take(current, index)
            else:
                self._collect_absent(current, index)
        if current.follows:
            return
        self._usage.report_absent(counts, current.report)
        if not self._usage.static and not self._usage.find_unused:
            parameters = zip(self._gradients.names, self._gradients.parameters, strict=True)
            frozen = [name for name, parameter in parameters if not parameter.requires_grad]
            if frozen:
                current.report.errors.append(
                    f"{', '.join(frozen)} needed a gradient when the module was wrapped, but need none now"
                )
