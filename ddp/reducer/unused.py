"""Which parameters get gradients, pass after pass: what is expected, what came, what no rank used.

With ``skip_all_reduce_unused_params=True`` (layer dropping, PyTorch Distributed, VLDB 2020, section 6.2.2) it
is found out before a pass which parameters no rank can reach in it, so that they are not sent. Ranks can
agree to leave gradients out only before the first bucket is due. So the graph is searched at the end of
forward, which is the price; an all-reduce adds up what the ranks found while the backward pass begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work
from collectives.ddp.module.arguments import Settings
from collectives.ddp.reducer.backward_pass import (
    CHANGED,
    MISSING,
    REPEATED,
    BackwardPass,
    ErrorReport,
    Forward,
)

_SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)

_MAX_OVERTAKEN = 8
"""After so many synchronised passes of other forwards, a forward is taken to have none itself."""


def _reachable_parameters(outputs: Iterable[torch.Tensor], accumulators: Mapping[Any, int]) -> set[int]:
    """Returns the parameters that the outputs depend on.

    Args:
        outputs: tensors.
        accumulators: indices of the parameters by the nodes that accumulate their gradients.
    """
    reached: set[int] = set()
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            index = accumulators.get(following)
            if index is None:
                stack.append(following)
            else:
                reached.add(index)
    return reached


class _SearchResult:
    """What the ranks reach in one forward; made by all ranks.

    Args:
        group: the ranks.
        mine: for each parameter whether this rank reaches it, or has accumulated in it before.
        device: device of tensors that the group takes.
    """

    def __init__(self, group: ProcessGroup, mine: Sequence[bool], device: torch.device) -> None:
        self.mine = mine
        self._group = group
        self._sums = torch.tensor(mine, dtype=torch.int32, device=device)
        self._work: Work | None = group.allreduce([self._sums], _SUM)
        self._on_any_rank: list[bool] = []

    def on_any_rank(self) -> list[bool]:
        """Returns for each parameter whether any rank reaches it; blocks until that is known."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._on_any_rank = [count > 0 for count in self._group.to_host(self._sums).tolist()]
        return self._on_any_rank


class UnusedParameters:
    """How often the gradients of some parameters come in a pass, and how often they should.

    A parameter is *used* where it got a gradient since the last synchronised pass, that one not included.

    Attributes:
        find_unused: whether parameters may be unused in a pass.
        static: whether all passes use the parameters alike, so that the first one tells how.
        expected: how often each gradient comes in a pass; ``None`` before the first one of a static graph has
            ended.
        used: for each parameter a number that is not zero where it is used.
        counts: how often each gradient came in the last pass that ended well; empty before the first one.
        is_constant: whether all passes that ended well used the parameters alike.
        is_local: whether nothing communicates, so that nothing is skipped.

    Args:
        settings: of the model.
        accumulators: indices of the parameters by the nodes that accumulate their gradients.
    """

    def __init__(self, settings: Settings, accumulators: Mapping[Any, int]) -> None:
        self._settings = settings
        self._accumulators = accumulators
        self.is_local = False
        self._pending: list[Forward] = []  # without a synchronised pass over them
        self._results: weakref.WeakKeyDictionary[Forward, _SearchResult] = weakref.WeakKeyDictionary()
        self._names = list(settings.parameters)
        count = len(self._names)
        self.find_unused = settings.find_unused or settings.skip_unused
        self.static = False
        self.expected: list[int] | None = [1] * count
        self.used = [0] * count
        self.counts: list[int] = []
        self.is_constant = True
        self._unused_here: list[int] = []  # of a static graph
        self._unused_everywhere: Collection[int] = ()  # of a static graph
        self._is_settled = True  # whether the ranks have told each other those
        if settings.static:
            self.set_static()

    def set_static(self) -> None:
        """Promises from now on that all passes use the parameters alike."""
        self.static = True
        self.expected = None
        self._is_settled = False

    @property
    def searches_graph(self) -> bool:
        """Whether graphs are searched for what no rank can reach."""
        return self._settings.skip_unused and not self.static and not self.is_local

    @property
    def is_reported(self) -> bool:
        """Whether the ranks tell each other what they used in the next pass."""
        return self.find_unused or self.expected is None

    @property
    def unused_bytes(self) -> int:
        """Size of the gradients that did not come on this rank in the last synchronised pass."""
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter, count in zip(self._settings.parameters.values(), self.counts, strict=False)
            if not count
        )

    # ---- before a pass -----------------------------------------------------------------------------------

    def search_graph(self, forward: Forward, outputs: Iterable[torch.Tensor]) -> bool:
        """Searches the graph of a synchronised forward that just ended, where buckets may be skipped.

        Called by all ranks.

        Returns:
            Whether it did.
        """
        if not self.searches_graph:
            return False
        reached = _reachable_parameters(outputs, self._accumulators)
        mine = [bool(before) or index in reached for index, before in enumerate(self.used)]
        self._results[forward] = _SearchResult(self._settings.group, mine, self._settings.device)
        self._pending.append(forward)
        return True

    def unreachable(self, forwards: Iterable[Forward]) -> tuple[frozenset[int], Collection[int]]:
        """Returns the parameters that no rank gives a gradient in a pass, and those that this one does not.

        The first may be skipped. Blocks where the results of the ranks' searches are not here yet.

        Args:
            forwards: those that the pass is known to belong to.
        """
        if not self._settings.skip_unused:
            return frozenset(), self._unused_here
        if not self.searches_graph:
            return frozenset(self._unused_everywhere), self._unused_here
        results = [self._results[f] for f in {*self._pending, *forwards} if f in self._results]
        on_any_rank = [result.on_any_rank() for result in results]
        count = len(self.used)
        everywhere = {index for index in range(count) if not any(reached[index] for reached in on_any_rank)}
        here = [index for index in range(count) if not any(result.mine[index] for result in results)]
        return frozenset(everywhere), [*self._unused_here, *(i for i in here if not self.used[i])]

    # ---- within a pass -----------------------------------------------------------------------------------

    def note_gradient(self, current: BackwardPass, index: int) -> bool:
        """Takes note that a gradient came in a synchronised pass, and reports one that should not.

        Returns:
            Whether nothing more will be added to it in this pass.
        """
        if index in current.unused and self.searches_graph:
            current.report.errors.append(
                f"{self._names[index]} got a gradient, but nothing that forward returned depends on it, so "
                "that it was skipped; leave out skip_all_reduce_unused_params"
            )
            return False
        if self.expected is None:
            return False
        surplus = current.counts[index] - self.expected[index]
        if surplus == 1:
            fault = CHANGED if self.static else REPEATED
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
            report.faults[CHANGED] = [name for name, count, before in triples if count != before]
        elif not self.static and not self.find_unused:
            self._report_unused(counts, report)

    def _report_unused(self, counts: Sequence[int], report: ErrorReport) -> None:
        for name, count in zip(self._names, counts, strict=True):
            if not count:
                report.blame(MISSING, name)
        names = [name for name, p in self._settings.parameters.items() if not p.requires_grad]
        if names:
            report.errors.append(
                f"{', '.join(names)} needed a gradient when the module was wrapped, but need none now"
            )

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
        """Begins anew, after a synchronised pass; called by all ranks.

        Forgets forwards that had theirs, or that so many others overtook. Not all forwards have a pass:
        counted by passes, they are forgotten on all ranks at once. One that still has its own begins it with
        what it reaches.
        """
        self.used = [0] * len(self.used)
        for forward in self._pending:
            forward.overtaken += 1
        self._pending = [f for f in self._pending if not f.averaged and f.overtaken < _MAX_OVERTAKEN]

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
