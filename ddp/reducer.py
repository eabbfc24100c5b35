"""The reducer: averages gradients over all ranks while the backward pass computes them.

Words used here. A *task* is one run of the autograd engine; a task within a task (reentrant activation
checkpointing) is *nested*. A *pass* is one backward pass of the user: the outermost task with those nested in
it. A pass is *synchronised* where a forward that it belongs to ran outside ``no_sync``.

Algorithm 1 of PyTorch Distributed (VLDB 2020, section 3.2): one hook for each parameter puts the gradient
into its bucket; full buckets are reduced asynchronously, strictly in the order of the buckets, which is the
same on all ranks; the pass ends with a wait for all of them. Unlike there, the graph is never walked: what
is absent from the pass is what the engine has not delivered when it ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from collectives import BroadcastOptions, ProcessGroup
from collectives.ddp.averaging import average, averaging_op
from collectives.ddp.buckets import Bucket
from collectives.ddp.engine import (
    NO_TASK,
    OutputHook,
    TaskGuard,
    accumulator,
    current_task,
    gradient_hook,
    runs_backward,
    will_accumulate,
)
from collectives.ddp.grad_bucket import GradBucket
from collectives.ddp.gradients import BadGradientError, Gradients
from collectives.ddp.usage import UsageMap
from collectives.ddp.verdict import Report, ReportExchange, sync_error

__all__ = ["Hook", "Reducer"]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
"""A communication hook: takes its state and a full bucket, returns a future of the averaged flat tensor."""


class Reducer:
    """Averages the gradients of some parameters over a group, in place, at every synchronised pass.

    All ranks make one with the same parameters in the same order. It holds hooks on the parameters until it
    is deleted or closed; they hold it weakly.

    Attributes:
        gradients: the gradients and their buckets.
        passes: number of synchronised passes that ended well.
        same_usage: whether all of them used the parameters alike.
        initial_bucket_bytes: sizes of the buckets before the first pass.
        has_rebuilt_buckets: whether the ranks have agreed on the order of the gradients in the first pass.
        ready_order: indices of the parameters in the order of their gradients in the first pass.

    Args:
        parameters: parameters that need gradients, by name.
        group: the ranks.
        model: the model in words, for messages.
        limits: caps of the buckets in bytes, from :func:`~collectives.ddp.buckets.bucket_limits`.
        find_unused_parameters: whether parameters may be absent from a pass.
        gradient_as_bucket_view: whether ``.grad`` shares its memory with the buckets.
        static_graph: whether all passes use the parameters alike, so that the first one tells how.
        batched_grad_copy: whether gradients are collected when their bucket is full, all at once.
    """

    _task: int
    _committed: bool
    _broken: bool
    _nested: bool
    _ending: bool
    _counts: list[int]

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        group: ProcessGroup,
        *,
        model: str,
        limits: Sequence[int],
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        batched_grad_copy: bool = False,
    ) -> None:
        self._group = group
        self._model = model
        self._find_unused = find_unused_parameters
        self._static = static_graph
        self._batched = batched_grad_copy
        for parameter in parameters.values():
            averaging_op(group, parameter.dtype, parameter.device)
        self.gradients = Gradients(parameters, limits, as_views=gradient_as_bucket_view)
        self.initial_bucket_bytes = [bucket.nbytes for bucket in self.gradients.buckets]
        self._device = self.gradients.parameters[0].device
        self._lock = threading.RLock()

        self._hook: Hook | None = None
        self._hook_state: Any = None
        self._hook_is_local = False

        self._once = [1] * len(parameters)
        # How often each gradient comes in a pass; None before the first pass of a static graph has ended.
        self._expected: list[int] | None = None if static_graph else self._once
        self._idle: list[int] = []  # parameters of a static graph that never get a gradient here
        self._unused_everywhere: frozenset[int] = frozenset()  # ... and on no other rank
        self._used = [0] * len(parameters)  # adds up over passes under no_sync
        self._usage = self._make_usage_map()

        self.passes = 0
        self.same_usage = True
        self.has_rebuilt_buckets = False
        self.ready_order: list[int] = []
        self._last_counts: list[int] = []
        self._expect_sync = False
        self._stale: list[Bucket | UsageMap | ReportExchange] = []
        self._open: set[int] = set()
        self._sync = False
        self._reset()

        self._accumulators = [accumulator(parameter) for parameter in self.gradients.parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(gradient_hook(self, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.gradients.parameters)
        ]

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    def close(self) -> None:
        """Removes the hooks from the parameters; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    # ---- what the module calls ---------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is going on."""
        return bool(self._open)

    @property
    def unused_bytes(self) -> int:
        """Size of the gradients that were absent on this rank from the last synchronised pass."""
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter, count in zip(self.gradients.parameters, self._last_counts, strict=False)
            if not count
        )

    def register_hook(self, state: object, hook: Hook, *, is_local: bool) -> None:
        """Hands the reduction of full buckets to a communication hook."""
        self._hook_state = state
        self._hook = hook
        self._hook_is_local = is_local
        self._usage = self._make_usage_map()

    def set_static_graph(self) -> None:
        """Promises from now on that all passes use the parameters alike."""
        self._static = True
        self._expected = None
        self._usage = self._make_usage_map()

    def before_forward(self) -> None:
        """Lays the buckets out again, once, in the order that the first pass showed on rank 0.

        Called before each synchronised forward, on all ranks.
        """
        self._settle()
        may_rebuild = self._static or not self._find_unused
        if self.has_rebuilt_buckets or not may_rebuild or not self.passes or self._open:
            return
        order = torch.tensor(self.ready_order, dtype=torch.int64, device=self._device)
        if not self._hook_is_local:
            self._group.broadcast([order], BroadcastOptions(asyncOp=False, rootRank=0)).wait()
        self.has_rebuilt_buckets = True
        self.gradients.lay_out(order.tolist())

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor], sync: bool) -> None:
        """Tells what the backward pass of the forward that just ran must do.

        Called at the end of each forward that records a graph. The pass begins when the engine reaches one of
        the outputs; where it reaches a parameter without that, the pass is taken for the latest forward's.

        Args:
            outputs: tensors that the forward returned.
            sync: whether gradients are averaged; ``False`` under ``no_sync``.
        """
        self._expect_sync = sync
        hook = OutputHook(self, sync)
        for output in outputs:
            if output.requires_grad and not output.is_leaf:
                output.register_hook(hook)  # type: ignore[no-untyped-call]

    # ---- what the autograd engine calls ------------------------------------------------------------------

    def autograd_hook(self, index: int) -> None:
        """Called when the gradient of a parameter was accumulated in ``.grad``."""
        with self._lock:
            if current_task() != self._task:
                self._enter_task(None)
            count = self._counts[index] + 1
            self._counts[index] = count
            if self._sync:
                self._gradient_came(index, count)

    def output_hook(self, sync: bool) -> None:
        """Called when the gradient of an output of forward was computed.

        It may be the beginning of ``torch.autograd.grad``, which accumulates nothing: such a task leaves no
        trace.
        """
        with self._lock:
            if current_task() != self._task:
                self._enter_task(sync)
            if not sync:
                return
            if not self._sync:
                self._begin_sync()
            if not self._committed:
                self._committed = any(map(will_accumulate, self._accumulators)) or runs_backward()

    def end_task(self, task: int) -> None:
        """Called when a task is complete; what is raised here, ``backward()`` raises."""
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            try:
                if not self._took_part():
                    return
                if self._needs_usage():
                    self._used = [int(u or c > 0) for u, c in zip(self._used, self._counts, strict=True)]
                if self._sync:
                    self._expect_sync = False
                    with torch.no_grad():
                        self._finish()
            finally:
                self._reset()

    def fail_task(self, task: int) -> None:
        """Called when an exception broke a task off."""
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            try:
                if self._sync and self._took_part() and not self._broken:
                    self._expect_sync = False
                    with torch.no_grad(), contextlib.suppress(Exception):
                        self._abandon()
            finally:
                self._reset()

    # ---- passes ------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Ends the pass."""
        if self._sync:
            self._used = [0] * len(self._used)
        self._open.clear()
        self._task = NO_TASK
        self._sync = False
        self._committed = False
        self._broken = False
        self._nested = False
        self._ending = False
        self._counts = [0] * len(self.gradients)
        self._order: list[int] = []
        self._absent: set[int] = set()
        self._next = 0
        self._report = Report(total=len(self.gradients))

    def _enter_task(self, sync: bool | None) -> None:
        """Notes that hooks now run in another task than before; the first task of all begins a pass."""
        task = current_task()
        if task not in self._open:
            begins = not self._open
            TaskGuard(self, task)
            self._open.add(task)
            self._nested = not begins
            if begins:
                self._settle()
                if self._expect_sync if sync is None else sync:
                    self._begin_sync()
        self._task = task

    def _begin_sync(self) -> None:
        """Makes the pass a synchronised one; gradients that came before are taken now."""
        self._sync = True
        self.gradients.reset()
        for index in self._idle:
            self._collect_absent(index)
        for index, count in enumerate(self._counts):
            if count:
                self._gradient_came(index, count)

    def _took_part(self) -> bool:
        """Returns whether the pass reached a parameter, or would have."""
        return self._committed or any(self._counts)

    def _needs_usage(self) -> bool:
        """Returns whether the ranks count how many of them gave each parameter a gradient."""
        return self._find_unused or self._expected is None

    def _make_usage_map(self) -> UsageMap | None:
        """Returns the map for the next passes, or ``None`` where the flag in the last bucket is enough."""
        if self._hook_is_local:
            return None
        if self._needs_usage():
            return UsageMap(self._group, len(self.gradients), self._device)
        if self._hook is not None:
            return UsageMap(self._group, 0, self._device)
        return None

    def _start_usage(self) -> None:
        if self._usage is not None:
            used = self._used if self._needs_usage() else ()
            self._usage.start(used, trouble=bool(self._report))

    def _abandon(self) -> None:
        """Gives the peers of a pass that broke off here what they wait for, and the report."""
        self._report.errors.append("its backward pass was broken off by an exception, which is raised there")
        if self._hook_is_local:
            return
        buckets = self.gradients.buckets
        self._stale += buckets
        for bucket in buckets[self._next :]:
            bucket.buffer.zero_()
            self._launch(bucket)
        self._start_usage()
        if self._usage is not None:
            self._stale.append(self._usage)
        self._stale.append(ReportExchange(self._group, self._report, self._device))

    def _settle(self) -> None:
        """Waits for what a pass that broke off has issued; its error was raised then."""
        stale, self._stale = self._stale, []
        for item in stale:
            with contextlib.suppress(Exception):
                item.wait()

    # ---- gradients ---------------------------------------------------------------------------------------

    def _gradient_came(self, index: int, count: int) -> None:
        if not self.passes:
            self._order.append(index)
        expected = self._expected
        if expected is None:
            return
        if count != expected[index]:
            if count == expected[index] + 1:
                names = self._report.changed if self._static else self._report.repeated
                names.append(self.gradients.names[index])
            return
        if not self._batched:
            self._collect(index)
        if self.gradients.bucket_of[index].mark_ready():
            self._launch_ready()

    def _collect(self, index: int) -> None:
        try:
            if torch.is_grad_enabled():  # backward(create_graph=True)
                with torch.no_grad():
                    self.gradients.collect(index)
            else:
                self.gradients.collect(index)
        except BadGradientError as error:
            self._report.errors.append(str(error))

    def _collect_absent(self, index: int) -> None:
        self._absent.add(index)
        try:
            with torch.no_grad():
                self.gradients.collect_absent(index)
        except BadGradientError as error:
            self._report.errors.append(str(error))
        self.gradients.bucket_of[index].mark_ready()

    def _launch_ready(self) -> None:
        """Launches full buckets in order, up to the first that is not full (Fig. 3(a) of the paper)."""
        buckets = self.gradients.buckets
        # Nested tasks may yet bring a gradient again; the flag that tells so leaves with the last bucket.
        end = len(buckets) - (self._nested and not self._ending)
        while self._next < end and not buckets[self._next].pending:
            bucket = buckets[self._next]
            if self._batched:
                try:
                    with torch.no_grad():
                        self.gradients.collect_bucket(bucket, self._absent)
                except BadGradientError as error:
                    self._report.errors.append(str(error))
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Starts the reduction of a bucket; the last one carries the flag."""
        self._next = bucket.index + 1
        try:
            if self._hook is not None:
                bucket.mark_launched(future=self._run_hook(self._hook, bucket))
                return
            if bucket.flag is not None:
                bucket.flag.fill_(float(bool(self._report)))
            bucket.mark_launched(work=average(self._group, bucket.wire))
        except BaseException:
            self._broken = True
            raise

    def _run_hook(self, hook: Hook, bucket: Bucket) -> Future[torch.Tensor]:
        names = [self.gradients.names[index] for index in bucket.indices]
        last = bucket.index == len(self.gradients.buckets) - 1
        future = hook(self._hook_state, GradBucket(bucket, names, last=last))
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"[rank {self._group.rank()}] the communication hook must return a torch.futures.Future of a "
                f"tensor, but returned a value of type {type(future).__name__} for bucket {bucket.index}"
            )
        return future

    # ---- end of a synchronised pass ----------------------------------------------------------------------

    def _finish(self) -> None:
        """Gives the peers what is still owed, waits, writes ``.grad``, asks whether all ranks are well."""
        self._ending = True
        self._complete_buckets()
        self._launch_ready()
        self._start_usage()
        self._wait_for_buckets()
        counts = self._verdict()
        for index in self._absent:
            used = counts[index] > 0 if counts else index not in self._unused_everywhere
            self.gradients.deliver_absent(index, used=used)
        if self._expected is None:
            self._expected = list(self._counts)
            self._idle = [index for index, count in enumerate(self._counts) if not count]
            self._unused_everywhere = frozenset(index for index in self._idle if not counts[index])
            self._usage = self._make_usage_map()
        self._note_good_pass()

    def _complete_buckets(self) -> None:
        """Collects what the hooks did not, and reports what should not be absent."""
        counts, expected, names = self._counts, self._expected, self.gradients.names
        if counts == expected:
            return
        for index, count in enumerate(counts):
            if expected is not None and count >= expected[index]:
                continue
            if not count:
                self._collect_absent(index)
                continue
            if not self._batched:
                self._collect(index)
            self.gradients.bucket_of[index].mark_ready()
        if not self._static and not self._find_unused:
            self._report.missing = [name for name, count in zip(names, counts, strict=True) if not count]
        elif self._static and expected is not None:
            self._report.changed = [
                name for name, count, before in zip(names, counts, expected, strict=True) if count != before
            ]

    def _wait_for_buckets(self) -> None:
        failure: Exception | None = None
        for bucket in self.gradients.buckets:
            try:
                bucket.wait()
                if failure is None and not self._report:
                    self.gradients.write_back(bucket, self._absent)
            except Exception as error:  # noqa: BLE001, PERF203 - raised below, after the others ended
                failure = failure or error
        if failure is not None:
            raise failure

    def _verdict(self) -> list[int]:
        """Returns on how many ranks each parameter got a gradient, where the ranks counted that.

        Raises:
            GradientSyncError: a rank is in trouble; raised on all ranks.
        """
        counts: list[int] = []
        trouble = False
        if self._usage is not None:
            counts, trouble = self._usage.wait()
        elif self._hook_is_local:
            counts = self._used if self._needs_usage() else []
        else:
            flag = self.gradients.buckets[-1].flag
            trouble = flag is not None and bool(flag.item())
        if trouble:
            raise ReportExchange(self._group, self._report, self._device).error(self._model)
        if self._report:  # only this rank knows: nothing communicates, or the flag had left already
            raise sync_error(self._group, self._model, {self._group.rank(): self._report.encode()})
        return counts

    def _note_good_pass(self) -> None:
        if self.passes:
            self.same_usage = self.same_usage and self._counts == self._last_counts
        else:
            came = list(reversed(dict.fromkeys(reversed(self._order))))  # each at its last time
            self.ready_order = came + sorted(set(range(len(self.gradients))).difference(came))
        self._last_counts = self._counts
        self.passes += 1
