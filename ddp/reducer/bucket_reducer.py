"""The launcher: issues the reductions of full buckets in order, and waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from collectives import Work
from collectives.ddp.reducer.averaging import Averager, average
from collectives.ddp.reducer.buckets import Bucket, BucketState
from collectives.ddp.reducer.grad_bucket import BucketLayout, GradBucket
from collectives.ddp.reducer.gradients import Gradients
from collectives.ddp.reducer.passes import Pass
from collectives.ddp.reducer.sparse import SparseGradients
from collectives.ddp.timing import IterationClock, Mark
from collectives.errors import DistError

__all__ = ["Hook", "Launcher"]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
"""A communication hook: takes its state and a full bucket, returns a future of the averaged flat tensor."""


class Launcher:
    """Issues reductions strictly in the order of the buckets, which is the same on all ranks.

    Attributes:
        hook: the communication hook, which reduces instead of the group, with its state; or ``None``.
        is_local: whether nothing communicates, because the hook does not.
        clock: is told when the first bucket of a pass is launched; or ``None``.
        before_pass: is called before a pass of this rank communicates; or ``None``.

    Args:
        gradients: the gradients and their buckets.
        averager: averages over the ranks.
        sparse: the gradients that lie in no bucket.
    """

    def __init__(
        self, gradients: Gradients, averager: Averager, sparse: SparseGradients | None = None
    ) -> None:
        self._gradients = gradients
        self._averager = averager
        self._sparse = sparse
        self._fill_tail: Callable[[Pass, torch.Tensor], None] | None = None
        self.hook: tuple[Hook, Any] | None = None
        self.is_local = False
        self.clock: IterationClock | None = None
        self.before_pass: Callable[[], None] | None = None
        self._next = 0
        self._stale: list[Work | Future[Any]] = []

    def begin(self, fill_tail: Callable[[Pass, torch.Tensor], None]) -> None:
        """Begins a synchronised pass.

        Args:
            fill_tail: writes this rank's signals to a tail; kept until :meth:`end`.
        """
        self._next = 0
        self._fill_tail = fill_tail
        self._reset()

    def end(self) -> None:
        """Ends a synchronised pass."""
        self._fill_tail = None
        self._reset()

    def _reset(self) -> None:
        self._gradients.reset()
        if self._sparse is not None:
            self._sparse.reset()

    def layouts(self) -> list[BucketLayout]:
        """Returns what lies in the buckets."""
        names = self._gradients.names
        return [
            BucketLayout(bucket.index, tuple(names[i] for i in bucket.indices), tuple(bucket.parameters))
            for bucket in self._gradients.buckets
            if bucket.indices
        ]

    def lay_out(self, order: Sequence[int]) -> None:
        """Lays the buckets out for gradients that come in ``order``; tells the hook what changes."""
        before = self.layouts()
        if not self._gradients.lay_out(order) or self.hook is None:
            return
        for listener in self.hook[::-1]:
            tell = getattr(listener, "buckets_rebuilt", None)
            if callable(tell):
                tell(before, self.layouts())
                return

    # ---- launching ---------------------------------------------------------------------------------------

    def skip(self, unused: frozenset[int]) -> frozenset[int]:
        """Leaves the buckets out of this pass that hold nothing but unused parameters; returns those."""
        skipped = [b for b in self._gradients.buckets if b.indices and unused.issuperset(b.indices)]
        for bucket in skipped:
            bucket.skip()
        return frozenset(index for bucket in skipped for index in bucket.indices)

    def mark_ready(self, index: int) -> bool:
        """Counts one more gradient as there; returns whether that completes what it travels with."""
        bucket = self._gradients.bucket_of.get(index)
        if bucket is not None:
            return bucket.mark_ready()
        if self._sparse is not None:
            self._sparse.pending -= 1
            return not self._sparse.pending
        return False

    def launch_full(self, current: Pass) -> None:
        """Launches full buckets in order, up to the first that is not full (Fig. 3(a) of the paper)."""
        buckets = self._gradients.buckets
        # Nested tasks may yet bring a gradient again; the signals that tell so leave with the last bucket,
        # and so do those about sparse gradients.
        early = (current.nested and not current.ending) or (self._sparse is not None and self._sparse.pending)
        end = len(buckets) - bool(early)
        while self._next < end:
            bucket = buckets[self._next]
            if bucket.pending or (bucket.delayed and not (current.triggered or current.ending)):
                return
            self._open(current)
            if not bucket.skipped:
                self._fill(current, bucket)
            if bucket.tail is not None:
                self._announce(current)
            self._launch(current, bucket)

    def _open(self, current: Pass) -> None:
        """Tells that the pass is about to communicate, once."""
        if self._next or self.before_pass is None or self.is_local or current.follows:
            return
        try:
            self.before_pass()
        except BaseException:
            current.broken = True
            raise

    def _announce(self, current: Pass) -> None:
        if self._sparse is not None and not self.is_local:
            absent = {index for index in current.absent if not current.used_before[index]}
            self._sparse.announce(absent, trouble=bool(current.report), silent=current.silent)

    def _fill(self, current: Pass, bucket: Bucket) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                bad = self._gradients.fill(bucket, current.absent)
        else:
            bad = self._gradients.fill(bucket, current.absent)
        current.report.errors += bad

    def _launch(self, current: Pass, bucket: Bucket) -> None:
        """Starts the reduction of a bucket; the last one carries the signals."""
        self._next = bucket.index + 1
        if self.clock is not None:
            self.clock.mark(Mark.COMMUNICATION_BEGIN)
        try:
            if self.hook is not None:
                if bucket.indices and not bucket.skipped:
                    self._run_hook(current, *self.hook, bucket)
                return
            if bucket.tail is not None and self._fill_tail is not None:
                self._fill_tail(current, bucket.tail)
            wires = bucket.wires()
            bucket.mark_launched(work=self._averager.start(wires) if wires else None)
        except BaseException:
            current.broken = True
            raise

    def _run_hook(self, current: Pass, hook: Hook, state: Any, bucket: Bucket) -> None:
        """Calls the hook; what goes wrong is reported, and the pass goes on so that no peer waits."""
        later = self._gradients.buckets[bucket.index + 1 :]
        last = not any(other.indices and not other.skipped for other in later)
        try:
            future: Any = hook(state, GradBucket(bucket, self._names(bucket), last=last))
        except Exception as error:  # noqa: BLE001 - told to all ranks
            self._blame_hook(current, bucket, error)
            # Peers whose hooks did not fail wait for a message about this bucket.
            work = None if self.is_local else average(self._averager.group, bucket.buffer)
            bucket.mark_launched(work=work)
            return
        if not isinstance(future, torch._C.Future):
            self._blame_hook(
                current,
                bucket,
                TypeError(
                    "the communication hook must return a torch.futures.Future of a tensor, but returned a "
                    f"value of type {type(future).__name__} for bucket {bucket.index}"
                ),
            )
            bucket.mark_launched()
            return
        bucket.mark_launched(future=future)  # type: ignore[arg-type]

    def _names(self, bucket: Bucket) -> list[str]:
        return [self._gradients.names[index] for index in bucket.indices]

    def _blame_hook(self, current: Pass, bucket: Bucket, error: Exception) -> None:
        names = self._names(bucket)
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        current.report.errors.append(
            f"its communication hook failed on bucket {bucket.index} ({few}): {type(error).__name__}: {error}"
        )
        current.cause = current.cause or error

    # ---- the end of a pass -------------------------------------------------------------------------------

    def collect(self, current: Pass) -> None:
        """Waits for what the communication hook returned, where there is one, and reports what is wrong.

        Raises:
            DistError: a collective operation of the hook failed.
        """
        if self.hook is None:
            return
        failure: DistError | None = None
        for bucket in self._gradients.buckets:
            try:
                bucket.wait()
            except DistError as error:
                failure = failure or error
            except Exception as error:  # noqa: BLE001 - told to all ranks
                self._blame_hook(current, bucket, error)
            bucket.state = BucketState.DONE
        if failure is not None and current.cause is not None:
            # The hook failed on this rank before it sent what those of other ranks send.
            raise failure from current.cause
        if failure is not None:
            raise failure

    def finish(self, current: Pass) -> None:
        """Waits for all reductions and writes the averages to ``.grad``, where all is well so far.

        Raises:
            Exception: what the first reduction that failed, failed with; all have ended then.
        """
        failure: Exception | None = None
        if self._sparse is not None:
            self._sparse.exchange()
        for bucket in self._gradients.buckets:
            try:
                if bucket.state is not BucketState.DONE:
                    bucket.wait()
                self._rescale(bucket)
                if failure is None and not current.report:
                    self._gradients.write_back(bucket, current.absent)
            except Exception as error:  # noqa: BLE001, PERF203 - raised below, after the others ended
                failure = failure or error
        if failure is not None:
            raise failure
        if self._sparse is not None:
            self._sparse.finish()

    def _rescale(self, bucket: Bucket) -> None:
        """Makes a hook's mean over all ranks one over those that count."""
        divisor = self._averager.divisor
        if bucket.future is not None and divisor is not None and not self.is_local:
            bucket.buffer.mul_(self._averager.group.size() / divisor)

    def abandon(self, current: Pass) -> None:
        """Gives the peers of a pass that broke off here what they wait for, without waiting."""
        self._open(current)
        buckets = self._gradients.buckets
        self._gradients.part_from(buckets[: self._next])
        for bucket in buckets[self._next :]:
            if not bucket.skipped:
                self._gradients.fill_with_zeros(bucket)
            if bucket.tail is not None:
                self._announce(current)
            self._launch(current, bucket)
        self._stale += [
            carrier for bucket in buckets if (carrier := bucket.work or bucket.future) is not None
        ]

    def settle(self) -> None:
        """Waits for what a pass that broke off has issued; its error was raised then."""
        stale, self._stale = self._stale, []
        for carrier in stale:
            with contextlib.suppress(Exception):
                carrier.wait()
