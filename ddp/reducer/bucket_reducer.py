"""Reduces ready buckets in their order, by all-reduces or by a communication hook, and waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.futures import Future

from collectives import Work
from collectives.ddp.reducer.averaging import Averager
from collectives.ddp.reducer.backward_pass import BackwardPass
from collectives.ddp.reducer.buckets import Bucket, BucketState
from collectives.ddp.reducer.grad_bucket import BucketLayout, GradBucket
from collectives.ddp.reducer.gradients import BadGradientError, Gradients
from collectives.ddp.reducer.sparse import SparseGradients
from collectives.ddp.statistics.timing import IterationClock, Mark
from collectives.ddp.sync.recovery import Recovery
from collectives.errors import DistError

__all__ = ["BucketReducer", "Hook"]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
"""A communication hook: takes its state and a full bucket, returns a future of the averaged flat tensor."""


class BucketReducer:
    """Issues reductions strictly in the order of the buckets, which is the same on all ranks.

    Attributes:
        hook: the communication hook, which reduces instead of the group, with its state; or ``None``.
        is_local: whether nothing communicates, because the hook does not.
        abandoned: what was issued and has a result that nobody wants.
        holds_last: whether the last bucket, with the signals, waits for the end of the pass.
        before_pass: is called before a pass of this rank communicates; or ``None``.

    Args:
        gradients: the gradients and their buckets.
        averager: averages over the ranks.
        sparse: the gradients that lie in no bucket.
        clock: is told when the first bucket of a pass is launched.
        write_signals: writes this rank's signals to the tail of the last bucket.
        recovery: breaks passes off of which the hook fails.
    """

    def __init__(
        self,
        gradients: Gradients,
        averager: Averager,
        sparse: SparseGradients | None,
        clock: IterationClock,
        write_signals: Callable[[BackwardPass, torch.Tensor], None],
        recovery: Recovery,
    ) -> None:
        self._gradients = gradients
        self._averager = averager
        self._sparse = sparse
        self._clock = clock
        self._write_signals = write_signals
        self._recovery = recovery
        self.hook: tuple[Hook, Any] | None = None
        self.is_local = False
        self.holds_last = False
        self.before_pass: Callable[[], None] | None = None
        self._next = 0
        self.abandoned: list[Work | Future[Any]] = []
        self._left: list[tuple[Future[Any], torch.Tensor]] = []

    @property
    def is_drained(self) -> bool:
        """Whether all buckets of the pass were launched."""
        return self._next == len(self._gradients.buckets)

    def reset(self) -> None:
        """Begins or ends a synchronised pass."""
        self._next = 0
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

    def rebuild_buckets(self, order: Sequence[int]) -> None:
        """Lays the buckets out for gradients that come in ``order``; tells the hook what changes."""
        before = self.layouts()
        if not self._gradients.rebuild_buckets(order) or self.hook is None:
            return
        for listener in self.hook[::-1]:
            tell = getattr(listener, "buckets_rebuilt", None)
            if callable(tell):
                tell(before, self.layouts())
                return

    # ---- launching ---------------------------------------------------------------------------------------

    def skip(self, unused: frozenset[int]) -> frozenset[int]:
        """Leaves unused parameters out of this pass: buckets of them, and large ones where no hook reduces.

        Args:
            unused: indices of parameters that get no gradient on any rank.

        Returns:
            Those that are left out.
        """
        skipped = [b for b in self._gradients.buckets if b.indices and unused.issuperset(b.indices)]
        for bucket in skipped:
            bucket.skip()
        alone = self._gradients.leave_out(unused) if unused and self.hook is None else frozenset()
        return alone.union(*(bucket.indices for bucket in skipped))

    def mark_ready(self, current: BackwardPass, index: int) -> None:
        """Takes a gradient to which nothing will be added; launches the buckets that are full by it."""
        try:
            self._gradients.copy_to_bucket(index)
        except BadGradientError as error:
            current.report.errors.append(str(error))
        if self._count(index) and not current.ending:
            self.launch_ready(current)

    def mark_unused(self, current: BackwardPass, indices: Iterable[int]) -> None:
        """Takes something else for parameters to which this pass gives no gradient; launches nothing."""
        for index in indices:
            current.unused.add(index)
            try:
                self._gradients.fill_unused(index, zeros_only=current.zeros_only)
            except BadGradientError as error:
                current.report.errors.append(str(error))
            self._count(index)

    def _count(self, index: int) -> bool:
        """Counts one more gradient as ready; returns whether its bucket is full by it."""
        bucket = self._gradients.bucket_of.get(index)
        if bucket is not None:
            return bucket.mark_ready()
        if self._sparse is not None:
            self._sparse.pending -= 1
            return not self._sparse.pending
        return False

    def launch_ready(self, current: BackwardPass) -> None:
        """Launches full buckets in order, up to the first that is not full (Fig. 3(a) of the paper).

        The last one carries the signals. Of an abandoned pass, all others are launched with zeros. Of one
        that a hook's failure broke off, none is.
        """
        if current.broken_off:
            return
        try:
            self._launch_ready(current)
        except DistError:
            if not self._recovery.is_broken_off():
                raise
            current.broken_off, current.broken = True, False

    def _launch_ready(self, current: BackwardPass) -> None:
        buckets, sparse = self._gradients.buckets, self._sparse
        # Nested tasks may yet bring a gradient again; the signals that tell so leave with the last bucket,
        # and so do those about sparse gradients.
        early = not current.ending and (current.nested or self.holds_last)
        early = early or (sparse is not None and sparse.pending > 0)
        end = len(buckets) - (early and not current.abandoned)
        while self._next < end and not current.broken_off:
            bucket = buckets[self._next]
            if bucket.pending and not current.abandoned:
                return
            self._begin_communication(current)
            if not bucket.skipped and current.abandoned:
                self._gradients.fill_with_zeros(bucket)
            elif not bucket.skipped:
                current.report.errors += self._gradients.fill_bucket(bucket, current.unused)
            if bucket.tail is not None:
                self._announce_sparse(current)
            self._next += 1
            self._clock.mark(Mark.COMMUNICATION_BEGIN)
            try:
                if self.hook is None:
                    if bucket.tail is not None:
                        self._write_signals(current, bucket.tail)
                    tensors = bucket.tensors()
                    bucket.mark_launched(work=self._averager.start(tensors) if tensors else None)
                elif bucket.indices and not bucket.skipped:
                    self._run_hook(current, *self.hook, bucket)
            except BaseException:
                current.broken = True
                raise

    def _begin_communication(self, current: BackwardPass) -> None:
        """Calls :attr:`before_pass` before the first bucket."""
        if self._next or self.before_pass is None or self.is_local or current.shadow:
            return
        try:
            self.before_pass()
        except BaseException:
            current.broken = True
            raise

    def _announce_sparse(self, current: BackwardPass) -> None:
        if self._sparse is not None and not self.is_local:
            unused = {index for index in current.unused if not current.used_before[index]}
            self._sparse.announce(unused, error=bool(current.report), zeros_only=current.zeros_only)

    def _run_hook(self, current: BackwardPass, hook: Hook, state: Any, bucket: Bucket) -> None:
        """Calls the hook; where it fails, that is reported and the pass broken off, so that no peer waits."""
        later = self._gradients.buckets[bucket.index + 1 :]
        last = not any(other.indices and not other.skipped for other in later)
        try:
            future: Any = hook(state, GradBucket(bucket, self._names(bucket), last=last))
            if not _is_future(future):
                raise TypeError(
                    "the communication hook must return a torch.futures.Future of a tensor, but returned "
                    f"a value of type {type(future).__name__} for bucket {bucket.index}"
                )
        except BaseException as error:
            bucket.mark_launched()
            self._hook_failed(current, bucket, error)
            if not isinstance(error, Exception):
                raise
        else:
            bucket.mark_launched(future=future)

    def _names(self, bucket: Bucket) -> list[str]:
        return [self._gradients.names[index] for index in bucket.indices]

    def _hook_failed(self, current: BackwardPass, bucket: Bucket, error: BaseException) -> None:
        """Reports a failure of the hook, unless it comes of another rank's; the pass is to be left.

        Raises:
            DistError: the failure, where something else broke the group.
        """
        if self._recovery.is_broken_off():
            current.broken_off = True
            if self._recovery.comes_of_it(error):
                return
        elif not self.is_local and (broken := self._averager.group._first_cause()) is not None:
            raise error if isinstance(error, DistError) else broken from error
        names = self._names(bucket)
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        hook = self.hook[0] if self.hook else None
        name = getattr(hook, "__name__", type(hook).__name__)
        why = f"its communication hook {name} failed on bucket {bucket.index} ({few})"
        current.report.errors.append(f"{why}: {type(error).__name__}: {error}")
        current.cause = current.cause or error
        if not self.is_local:
            current.broken_off = True
            self._recovery.hook_failed(why, error, ending=current.ending)

    # ---- the end of a pass -------------------------------------------------------------------------------

    def wait_for_hook(self, current: BackwardPass) -> None:
        """Waits for what the communication hook returned, where there is one, and reports what is wrong.

        Raises:
            DistError: a collective operation of the hook failed, because something broke the group.
        """
        for bucket in self._gradients.buckets if self.hook is not None else ():
            if current.broken_off:  # nobody may complete the others
                return
            try:
                bucket.wait()
            except BaseException as error:
                self._hook_failed(current, bucket, error)
                if not isinstance(error, Exception):
                    raise
            bucket.state = BucketState.DONE

    def finalize(self, current: BackwardPass) -> None:
        """Waits for all reductions and writes the averages to ``.grad``, where all is well so far.

        Raises:
            Exception: what the first reduction that failed, failed with; all have ended then.
        """
        failure: Exception | None = None
        self._left.clear()
        if self._sparse is not None:
            self._sparse.exchange()
        for bucket in self._gradients.buckets:
            try:
                if bucket.state is not BucketState.DONE:
                    bucket.wait()
                self._rescale(bucket)
                if failure is None and not current.report:
                    self._gradients.finalize_bucket(bucket, current.unused)
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

    def let_go(self) -> None:
        """Takes other buckets after a pass that was broken off; the old ones stay while they may be written.

        MPI cannot call off what is in flight, and futures of the hook may yet write their results. Nobody has
        those of a call that failed; on a device, what they write may come after all that this rank waits for.
        """
        devices = {b.flat.device for b in self._gradients.buckets if b.flat.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)
        self._left += [(b.future, b.flat) for b in self._gradients.buckets if b.future is not None]
        self._left = [(future, flat) for future, flat in self._left if not _is_done(future)]
        self._gradients.copy_all()

    def abandon(self, current: BackwardPass) -> None:
        """Gives the peers of an abandoned pass what they wait for, without waiting."""
        buckets = self._gradients.buckets
        self._gradients.release_grads(buckets)
        self.launch_ready(current)
        if not current.broken_off:
            self.abandoned += [
                handle for bucket in buckets if (handle := bucket.work or bucket.future) is not None
            ]

    def wait_for_abandoned(self) -> None:
        """Waits for what an abandoned pass has issued; its error was raised then."""
        abandoned, self.abandoned = self.abandoned, []
        for handle in abandoned:
            with contextlib.suppress(Exception):
                handle.wait()


def _is_future(value: object) -> bool:
    return isinstance(value, torch._C.Future)


def _is_done(future: Future[Any]) -> bool:
    """Returns whether a future is complete; lets the current stream wait for its value then."""
    done = future.done()
    if done:
        with contextlib.suppress(Exception):
            future.wait()
    return done
