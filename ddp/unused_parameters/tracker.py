"""Tracks which parameters get gradients, pass after pass: what is expected, what came, what no rank used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from collectives.ddp.reducer.backward_pass import BackwardPass, Forward
from collectives.ddp.sync.error_report import ErrorReport
from collectives.ddp.unused_parameters import errors
from collectives.ddp.unused_parameters.graph_search import GraphSearch

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """How often the gradients of some parameters come in a pass, and how often they should.

    A parameter is *used* where it got a gradient since the last synchronised pass, that one not included.

    Attributes:
        search: finds before a pass what no rank can reach in it; ``None`` where no bucket is skipped.
        find_unused: whether parameters may be unused in a pass.
        static: whether all passes use the parameters alike, so that the first one tells how.
        expected: how often each gradient comes in a pass; ``None`` before the first one of a static graph has
            ended.
        used: for each parameter a number that is not zero where it is used.
        counts: how often each gradient came in the last pass that ended well; empty before the first one.
        is_constant: whether all passes that ended well used the parameters alike.

    Args:
        parameters: the parameters by name.
        find_unused: see above.
        static: see above.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], *, find_unused: bool, static: bool
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        count = len(self._names)
        self.search: GraphSearch | None = None
        self.find_unused = find_unused
        self.static = static
        self.expected: list[int] | None = None if static else [1] * count
        self.used = [0] * count
        self.counts: list[int] = []
        self.is_constant = True
        self._unused_here: list[int] = []  # of a static graph
        self._unused_everywhere: Collection[int] = ()  # of a static graph
        self._is_settled = not static  # whether the ranks have told each other those

    def set_static(self) -> None:
        """Promises from now on that all passes use the parameters alike."""
        self.static = True
        self.expected = None
        self._is_settled = False

    @property
    def searches_graph(self) -> bool:
        """Whether graphs are searched for what no rank can reach."""
        return self.search is not None and not self.static and not self.search.is_local

    @property
    def is_reported(self) -> bool:
        """Whether the ranks tell each other what they used in the next pass."""
        return self.find_unused or self.expected is None

    @property
    def unused_bytes(self) -> int:
        """Size of the gradients that did not come on this rank in the last synchronised pass."""
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter, count in zip(self._parameters, self.counts, strict=False)
            if not count
        )

    # ---- before a pass -----------------------------------------------------------------------------------

    def search_graph(self, forward: Forward, outputs: Iterable[torch.Tensor]) -> bool:
        """Searches the graph of a synchronised forward that just ended, where buckets may be skipped.

        Called by all ranks.

        Returns:
            Whether it did.
        """
        if self.search is None or not self.searches_graph:
            return False
        self.search.search(forward, outputs, self.used)
        return True

    def unreachable(self, current: BackwardPass) -> Collection[int]:
        """Returns the parameters that no rank gives a gradient in a pass, so that they may be skipped.

        Adds those that this rank gives none to ``current.unused``. Blocks where the results of the ranks'
        searches are not here yet.
        """
        current.unused.update(self._unused_here)
        if self.search is None:
            return ()
        if not self.searches_graph:
            return self._unused_everywhere
        everywhere, here = self.search.unreachable(current.forwards, len(self.used))
        current.unused.update(index for index in here if not self.used[index])
        return everywhere

    # ---- within a pass -----------------------------------------------------------------------------------

    def note_gradient(self, current: BackwardPass, index: int) -> bool:
        """Takes note that a gradient came in a synchronised pass, and reports one that should not.

        Returns:
            Whether nothing more will be added to it in this pass.
        """
        current.ready_order.append(index)
        if index in current.unused and self.searches_graph:
            current.report.errors.append(errors.skipped(self._names[index]))
            return False
        if self.expected is None:
            return False
        surplus = current.counts[index] - self.expected[index]
        if surplus == 1:
            fault = errors.CHANGED if self.static else errors.REPEATED
            current.report.blame(fault, self._names[index])
        return surplus == 0

    def incomplete(self, current: BackwardPass) -> list[int]:
        """Returns, at the end of a pass, the parameters whose gradients came less often than expected."""
        if current.counts == self.expected:
            return []
        expected = self.expected or [2**31] * len(current.counts)
        return [
            index
            for index, (count, before) in enumerate(zip(current.counts, expected, strict=True))
            if count < before and index not in current.unused
        ]

    def report_missing(self, current: BackwardPass) -> None:
        """Reports, at the end of a pass, what came less often than it had to."""
        counts, report = current.counts, current.report
        if counts == self.expected or current.shadow:
            return
        if report.errors and not any(counts):  # which says why
            return
        if self.static and self.expected is not None:
            triples = zip(self._names, counts, self.expected, strict=True)
            report.faults[errors.CHANGED] = [name for name, count, before in triples if count != before]
        elif not self.static and not self.find_unused:
            self._report_unused(counts, report)

    def _report_unused(self, counts: Sequence[int], report: ErrorReport) -> None:
        for name, count in zip(self._names, counts, strict=True):
            if not count:
                report.blame(errors.MISSING, name)
        parameters = zip(self._names, self._parameters, strict=True)
        names = [name for name, parameter in parameters if not parameter.requires_grad]
        if names:
            report.errors.append(errors.frozen(names))

    def local_used_map(self, counts: Sequence[int]) -> Sequence[int] | None:
        """Returns 1 for each parameter that is used or got a gradient in this pass, else 0.

        Args:
            counts: how often each gradient has come in this pass.

        Returns:
            ``None`` where all would be 1, or are taken to be.
        """
        if not self.is_reported or all(counts) or all(self.used):
            return None
        return [int(used or count > 0) for used, count in zip(self.used, counts, strict=True)]

    def globally_unused(self, current: BackwardPass, reported: Collection[int]) -> set[int]:
        """Returns the parameters that no rank used in a pass.

        Args:
            current: the pass.
            reported: those that the ranks reported as such in this pass.
        """
        unused = reported if self.find_unused or not self._is_settled else self._unused_everywhere
        return {*unused, *current.skipped}

    # ---- between passes ----------------------------------------------------------------------------------

    def add(self, counts: Sequence[int]) -> None:
        """Adds up what a pass used, synchronised or not."""
        used = self.local_used_map(counts)
        if used is not None:
            self.used = list(used)
        elif self.is_reported and not all(self.used):
            self.used = list(counts)

    def clear(self) -> None:
        """Begins anew, after a synchronised pass."""
        self.used = [0] * len(self.used)
        if self.search is not None:
            self.search.forget_averaged()

    def note(self, current: BackwardPass, reported: Collection[int]) -> None:
        """Takes in a synchronised pass that ended well.

        Args:
            current: the pass.
            reported: parameters that no rank used, where the ranks reported that.
        """
        counts = current.counts
        if not current.shadow:
            if self.expected is None:
                self.expected = list(counts)
                self._unused_here = [index for index, count in enumerate(counts) if not count]
            if self.counts:
                self.is_constant = self.is_constant and counts == self.counts
            self.counts = counts
        if not self._is_settled:
            self._unused_everywhere = reported
            self._is_settled = True
