"""Hooks that exchange more than one message for a bucket, each of which is made of what the last one brought.

A pass works on its buckets by turns: while the message of one travels, the next one is begun. All ranks issue
the messages in the same order, which the order of the buckets fixes, and no thread but the caller's does.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator
from typing import Any

import torch
from torch.futures import Future

from collectives.ddp.hooks.state import FeedbackState, is_torch_bucket, pending
from collectives.ddp.reducer.buckets import GradBucket

Phases = Generator[None, None, "torch.Tensor | Future[torch.Tensor] | Exception"]
"""Yields when a message is on its way of which another one is made, and waits for that when it goes on.

Returns the averages, or a future of them, or what a phase after the first one failed with. Knows no object
that holds its future: they would hold each other, and with them the memory of the bucket, where a pass breaks
off.
"""


class InPhases:
    """One bucket on its way from gradients to averages.

    Attributes:
        index: of the bucket.
        future: of the average.
        failure: what a phase after the first one failed with.

    Args:
        bucket: the bucket.
        phases: what is done with it.
    """

    def __init__(self, bucket: GradBucket, phases: Phases) -> None:
        self.index = bucket.index()
        self.future: Future[torch.Tensor] = pending(bucket.buffer())
        self.failure: Exception | None = None
        self._phases = phases
        self._is_torch = is_torch_bucket(bucket)
        self._is_over = False
        self._is_awaited = False

    def advance(self) -> None:
        """Runs the next phase, where one is left; what it returns as a failure, the future raises."""
        if self._is_over:
            return
        try:
            next(self._phases)
        except StopIteration as end:
            self._is_over = True
            self._conclude(end.value)

    def finish(self) -> None:
        """Runs all phases that are left."""
        while not self._is_over:
            self.advance()

    def outcome(self) -> Future[torch.Tensor]:
        """Returns the future, from now on always the same one.

        Raises:
            Exception: a phase has failed, of a bucket of torch's, which would take it for a value.
        """
        if self.failure is not None and self._is_torch:
            raise self.failure
        self._is_awaited = True
        return self.future

    def _conclude(self, outcome: torch.Tensor | Future[torch.Tensor] | Exception) -> None:
        if isinstance(outcome, Exception):
            self.failure = outcome
            _fail(self.future, outcome)
        elif not isinstance(outcome, Future):
            self.future.set_result(outcome)
        elif self._is_awaited:
            _follow(outcome, self.future)
        else:
            self.future = outcome


def _fail(future: Future[torch.Tensor], failure: Exception) -> None:
    traceback.clear_frames(failure.__traceback__)  # torch's future may keep it for ever
    future.set_exception(failure)  # type: ignore[arg-type]


def _follow(inner: Future[torch.Tensor], outer: Future[torch.Tensor]) -> None:
    """Completes a future as another one ends."""

    def complete(done: Future[torch.Tensor]) -> None:
        try:
            value = done.value()
        except Exception as failure:  # noqa: BLE001 - handed on
            _fail(outer, failure)
        else:
            outer.set_result(value)

    inner.add_done_callback(complete)


class PhasedState(FeedbackState):
    """State of a hook that works in phases."""

    def __init__(self, process_group: object = None, *, use_error_feedback: bool = True) -> None:
        super().__init__(process_group, use_error_feedback=use_error_feedback)
        self._under_way: InPhases | None = None

    def pass_failed(self) -> None:
        """Begins anew, on all ranks, after a pass that may have left different memories on them."""
        super().pass_failed()
        self._under_way = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle saves; called between two passes."""
        return {**super().__getstate__(), "_under_way": None}

    def enter(self, bucket: GradBucket, phases: Phases) -> InPhases:
        """Runs as much of all buckets' phases as can be without waiting idly for messages.

        Args:
            bucket: the bucket to begin.
            phases: what is done with it; what the first phase fails with is raised.

        Returns:
            The bucket on its way, whose :meth:`InPhases.outcome` the hook returns.
        """
        this = InPhases(bucket, phases)
        before, self._under_way = self._under_way, None
        if before is not None and before.index >= this.index:  # of a pass that was broken off
            before = None
        if before is not None:
            before.advance()
        try:
            this.advance()
        finally:
            if before is not None:
                before.finish()
        # torch may leave out the last bucket, so that its buckets cannot wait for one another.
        if bucket.is_last() or is_torch_bucket(bucket):
            this.finish()
        else:
            self._under_way = this
        return this

    @torch.no_grad()
    def flush(self, index: int) -> None:
        """Finishes the bucket under way, if any, so that its future is complete; waits for its messages.

        For who waits for a future before the next bucket's hook has run, as hooks around this one may. All
        ranks do so at the same place.

        Args:
            index: of the next bucket.
        """
        this, self._under_way = self._under_way, None
        if this is not None and this.index < index:  # else it is of a pass that was broken off
            this.finish()
