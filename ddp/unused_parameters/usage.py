"""Which parameters get gradients on this rank, pass after pass: what is expected, what came, what adds up."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from collectives.ddp.sync.error_report import Report

__all__ = ["Usage"]


class Usage:
    """How often the gradients of some parameters come in a pass, and how often they should.

    A parameter is *used* where it got a gradient since the last synchronised pass, that one not included.

    Attributes:
        find_unused: whether parameters may be absent from a pass.
        static: whether all passes use the parameters alike, so that the first one tells how.
        expected: how often each gradient comes in a pass; ``None`` before the first one of a static graph has
            ended.
        idle: parameters of a static graph that never get a gradient on this rank.
        unused_everywhere: those of them that get none on any rank.
        is_settled: whether the ranks have told each other those.
        used: for each parameter a number that is not zero where it is used.
        counts: how often each gradient came in the last pass that ended well; empty before the first one.
        is_constant: whether all passes that ended well used the parameters alike.

    Args:
        names: names of the parameters.
        find_unused: see above.
        static: see above.
    """

    def __init__(self, names: Sequence[str], *, find_unused: bool, static: bool) -> None:
        self._names = names
        self.find_unused = find_unused
        self.static = static
        self.expected: list[int] | None = None if static else [1] * len(names)
        self.idle: list[int] = []
        self.unused_everywhere: Collection[int] = ()
        self.is_settled = not static
        self.used = [0] * len(names)
        self.counts: list[int] = []
        self.is_constant = True

    def set_static(self) -> None:
        """Promises from now on that all passes use the parameters alike."""
        self.static = True
        self.expected = None
        self.is_settled = False

    @property
    def is_told(self) -> bool:
        """Whether the ranks tell each other what they used in the next pass."""
        return self.find_unused or self.expected is None

    # ---- within a pass -----------------------------------------------------------------------------------

    def tell(self, counts: Sequence[int]) -> Sequence[int] | None:
        """Returns 1 for each parameter that is used or got a gradient in this pass, else 0.

        Args:
            counts: how often each gradient has come in this pass.

        Returns:
            ``None`` where all would be 1, or are taken to be.
        """
        if not self.is_told or all(counts) or all(self.used):
            return None
        return [int(used or count > 0) for used, count in zip(self.used, counts, strict=True)]

    def report_surplus(self, index: int, count: int, report: Report) -> None:
        """Reports a gradient that came for the ``count``-th time, once it is one time too many."""
        if self.expected is not None and count == self.expected[index] + 1:
            (report.changed if self.static else report.repeated).append(self._names[index])

    def report_absent(self, counts: Sequence[int], report: Report) -> None:
        """Reports, at the end of a pass, what came less often than it had to."""
        if self.static and self.expected is not None:
            triples = zip(self._names, counts, self.expected, strict=True)
            report.changed = [name for name, count, before in triples if count != before]
        elif not self.static and not self.find_unused:
            pairs = zip(self._names, counts, strict=True)
            report.missing = [name for name, count in pairs if not count]

    # ---- between passes ----------------------------------------------------------------------------------

    def add(self, counts: Sequence[int]) -> None:
        """Adds up what a pass used, synchronised or not."""
        told = self.tell(counts)
        if told is not None:
            self.used = list(told)
        elif self.is_told and not all(self.used):
            self.used = list(counts)

    def clear(self) -> None:
        """Begins anew, after a synchronised pass."""
        self.used = [0] * len(self.used)

    def unused(self, told: Collection[int]) -> Collection[int]:
        """Returns the parameters that no rank used in a pass.

        Args:
            told: those of which the ranks told each other so in this pass.
        """
        return told if self.find_unused or not self.is_settled else self.unused_everywhere

    def note_followed(self, unused: Collection[int]) -> None:
        """Takes in a synchronised pass of other ranks.

        Args:
            unused: parameters that no rank used, where the ranks told each other.
        """
        if not self.is_settled:
            self.unused_everywhere = unused
            self.is_settled = True

    def note(self, counts: list[int], unused: Collection[int]) -> None:
        """Takes in a synchronised pass that ended well.

        Args:
            counts: how often each gradient came.
            unused: parameters that no rank used, where the ranks told each other.
        """
        if self.expected is None:
            self.expected = list(counts)
            self.idle = [index for index, count in enumerate(counts) if not count]
        self.note_followed(unused)
        if self.counts:
            self.is_constant = self.is_constant and counts == self.counts
        self.counts = counts
