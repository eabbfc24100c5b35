"""The reducer: averages gradients over all ranks while the backward pass computes them.

Words used here. A *task* is one run of the autograd engine; a task within a task (reentrant activation
checkpointing) is *nested*. A *pass* is one backward pass of the user: the outermost task with those nested in
it. A pass is *synchronised* where a forward of this pass ran outside ``no_sync``. A gradient is *collected*
when it was put into its bucket; a parameter is *absent* from a pass that gave it no gradient.

Algorithm 1 of PyTorch Distributed (VLDB 2020, section 3.2): one hook for each parameter puts the gradient
into its bucket; full buckets are reduced asynchronously, strictly in the order of the buckets, which is the
same on all ranks; the pass ends with a wait for all of them. The graph is never walked: what is absent is
known when the engine has ended the pass, and costs nothing to find out before.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from collectives import BroadcastOptions, ProcessGroup
from collectives.ddp.averaging import average, averaging_op
from collectives.ddp.buckets import Bucket, assign_buckets
from collectives.ddp.engine import NO_TASK, TaskGuard, accumulator, current_task, will_accumulate
from collectives.ddp.grad_bucket import GradBucket
from collectives.ddp.usage import UsageMap
from collectives.ddp.verdict import Report, ReportExchange, sync_error

__all__ = ["Hook", "Reducer"]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
"""A communication hook: takes its state and a full bucket, returns a future of the averaged flat tensor."""


class Reducer:
    """Averages the gradients of some parameters over a group, in place, at every synchronised backward pass.

    All ranks make one with the same parameters in the same order. Holds hooks on the parameters until it is
    deleted or :meth:`close` is called; they hold it weakly.

    Args:
        parameters: parameters that need gradients, by name.
        group: the ranks.
        model: the model in words, for messages.
        limits: caps of the buckets in bytes, from :func:`~collectives.ddp.buckets.bucket_limits`.
        find_unused_parameters: whether parameters may be absent from a pass.
        gradient_as_bucket_view: whether ``.grad`` shares its memory with the buckets.
        static_graph: whether all passes use the parameters alike, so that the first one tells how.
        batched_grad_copy: whether gradients are copied when their bucket is full, all at once, not each when
            it is there.
    """

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
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._group = group
        self._model = model
        self._limits = list(limits)
        self._find_unused = find_unused_parameters
        self._view_mode = gradient_as_bucket_view
        self._static = static_graph
        self._batched = batched_grad_copy
        self._device = self._parameters[0].device
        self._lock = threading.RLock()

        self._hook: Hook | None = None
        self._hook_state: Any = None
        self._hook_is_local = False

        count = len(self._parameters)
        self._once = [1] * count
        self._expected: list[int] | None = None if static_graph else self._once
        """How often each gradient comes in a pass; unknown until the first pass of a static graph has ended."""
        self._unused_everywhere: frozenset[int] = frozenset()
        self._used = [0] * count
        """Which parameters took part since the last synchronised pass; the map adds up over ``no_sync`` passes."""
        self._traced_order: list[int] = []
        self._laid_out_again = False
        self.passes = 0
        """Number of synchronised passes that ended well."""
        self.same_usage = True
        """Whether all synchronised passes so far used the parameters alike."""
        self._last_counts: list[int] = []
        self._idle: list[int] = []

        self._open: set[int] = set()
        self._task = NO_TASK
        self._expect_sync = False
        self._stale: list[Bucket | ReportExchange | UsageMap] = []
        for parameter in self._parameters:
            averaging_op(group, parameter.dtype, parameter.device)
        self._lay_out(range(count - 1, -1, -1))
        self.initial_bucket_bytes = [b.buffer.numel() * b.buffer.element_size() for b in self._buckets]
        """Sizes of the buckets before the first pass."""
        self._reset()

        self._accumulators = [accumulator(parameter) for parameter in self._parameters]
        reference = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_gradient_hook(reference, index))
            for index, parameter in enumerate(self._parameters)
        ]

    # ---- what the module calls ---------------------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in the order of their reduction."""
        return tuple(self._buckets)

    @property
    def has_rebuilt_buckets(self) -> bool:
        """Whether all ranks agreed on the order of the gradients in the first pass."""
        return self._laid_out_again

    @property
    def limits(self) -> tuple[int, ...]:
        """Caps of the buckets in bytes."""
        return tuple(self._limits)

    @property
    def last_ready_order(self) -> list[int]:
        """Indices of the parameters in the order of their gradients in the first synchronised pass; empty before it ended."""
        return list(self._traced_order)

    @property
    def unused_bytes(self) -> int:
        """Size of the gradients that were absent on this rank from the last synchronised pass."""
        return sum(
            p.numel() * p.element_size()
            for p, count in zip(self._parameters, self._last_counts, strict=False)
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

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is going on."""
        return bool(self._open)

    def before_forward(self) -> None:
        """Lays the buckets out again where the first pass showed another order; called before each synchronised forward, on all ranks."""
        self._settle()
        may_rebuild = self._static or not self._find_unused
        if self._laid_out_again or not may_rebuild or not self.passes or self._open:
            return
        order = torch.tensor(self._traced_order, dtype=torch.int64, device=self._device)
        if not self._hook_is_local:
            self._group.broadcast([order], BroadcastOptions(asyncOp=False, rootRank=0)).wait()
        self._laid_out_again = True
        self._lay_out(order.tolist())

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor], sync: bool) -> None:
        """Tells what the backward pass of the forward that just ran must do; called at the end of each
        forward that records a graph.

        Args:
            outputs: tensors that the forward returned.
            sync: whether gradients are averaged; ``False`` under ``no_sync``.
        """
        self._expect_sync = sync
        hook = _output_hook(weakref.ref(self), sync)
        for output in outputs:
            if output.requires_grad and not output.is_leaf:
                output.register_hook(hook)

    def close(self) -> None:
        """Removes the hooks from the parameters; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    # ---- layout ------------------------------------------------------------------------------------------------------------------------

    def _lay_out(self, order: Iterable[int]) -> None:
        """Makes the buckets for gradients that come in ``order``; gradients that are views move along."""
        assignment = assign_buckets(
            [p.numel() * p.element_size() for p in self._parameters],
            [(p.device, p.dtype) for p in self._parameters],
            self._limits,
            order,
        )
        old_views: list[torch.Tensor] = getattr(self, "_views", [])
        if old_views and assignment == [bucket.indices for bucket in self._buckets]:
            return
        self._buckets = [
            Bucket(place, group, [self._parameters[i] for i in group], with_flag=place == len(assignment) - 1)
            for place, group in enumerate(assignment)
        ]
        self._bucket_of = [self._buckets[0]] * len(self._parameters)
        self._views = [self._buckets[0].buffer] * len(self._parameters)
        for bucket in self._buckets:
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                self._bucket_of[index] = bucket
                self._views[index] = view
        self._usage = self._make_usage_map()
        with torch.no_grad():
            for parameter, old, view in zip(self._parameters, old_views, self._views, strict=False):
                if parameter.grad is old:
                    view.copy_(old)
                    parameter.grad = view

    def _make_usage_map(self) -> UsageMap | None:
        """Returns the map that the next pass needs, or ``None`` where the flag in the last bucket is enough."""
        if self._hook_is_local:
            return None
        if self._needs_usage():
            return UsageMap(self._group, len(self._parameters), self._device)
        if self._hook is not None:
            return UsageMap(self._group, 0, self._device)
        return None

    # ---- tasks and passes --------------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Ends the pass."""
        self._open.clear()
        self._task = NO_TASK
        self._sync = False
        self._committed = False
        self._broken = False
        self._counts = [0] * len(self._parameters)
        self._absent: list[int] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._next = 0
        self._report = Report(total=len(self._parameters))
        self._ready_order: list[int] = []

    def _enter_task(self, sync: bool | None) -> None:
        """Notes that hooks now run in another task than before; the first task of all begins a pass."""
        task = current_task()
        if task not in self._open:
            begins = not self._open
            TaskGuard(weakref.ref(self), task)
            self._open.add(task)
            if begins:
                self._settle()
                if self._expect_sync if sync is None else sync:
                    self._begin_sync()
        self._task = task
        self._in_double_backward = torch.is_grad_enabled()

    def _begin_sync(self) -> None:
        self._sync = True
        for bucket in self._buckets:
            bucket.reset()
        if self._idle:
            with torch.no_grad():
                for index in self._idle:
                    self._collect_absent(index)
        for index, count in enumerate(self._counts):
            if count:
                self._gradient_came(index, count)

    def end_task(self, task: int) -> None:
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            try:
                took_part = self._committed or any(self._counts)
                if took_part and self._needs_usage():
                    self._used = [
                        used or int(count > 0) for used, count in zip(self._used, self._counts, strict=True)
                    ]
                if self._sync and took_part:
                    self._expect_sync = False
                    with torch.no_grad():
                        self._finish()
            finally:
                self._reset()

    def fail_task(self, task: int) -> None:
        """Ends a task that an exception broke off; peers get what they wait for, and the report."""
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            try:
                if self._sync and (self._committed or any(self._counts)) and not self._broken:
                    self._expect_sync = False
                    self._report.errors.append(
                        "its backward pass was broken off by an exception, raised there"
                    )
                    with torch.no_grad(), contextlib.suppress(Exception):
                        self._abandon()
            finally:
                self._reset()

    def _abandon(self) -> None:
        if self._hook_is_local:
            return
        self._stale += self._buckets
        for bucket in self._buckets[self._next :]:
            if self._view_mode:
                bucket.buffer.zero_()
            self._launch(bucket)
        usage = self._usage
        if usage is not None:
            self._stale.append(usage)
            usage.start(self._used if self._needs_usage() else (), trouble=True)
        self._stale.append(ReportExchange(self._group, self._report, self._device))

    def _settle(self) -> None:
        """Waits for the reductions of a pass that was broken off; its error was raised then."""
        stale, self._stale = self._stale, []
        for item in stale:
            with contextlib.suppress(Exception):
                item.wait()

    def _needs_usage(self) -> bool:
        """Returns whether the ranks count who gave which gradient in the pass."""
        return self._find_unused or self._expected is None

    # ---- hooks -------------------------------------------------------------------------------------------------------------------------

    def autograd_hook(self, index: int) -> None:
        """Called by the autograd engine when the gradient of a parameter was accumulated in ``.grad``."""
        with self._lock:
            if current_task() != self._task:
                self._enter_task(None)
            count = self._counts[index] + 1
            self._counts[index] = count
            if self._sync:
                self._gradient_came(index, count)

    def output_hook(self, sync: bool) -> None:
        """Called by the autograd engine when the gradient of an output of forward was computed: the pass
        begins here.

        It may as well be the beginning of ``torch.autograd.grad``, which does not accumulate gradients; such
        a task leaves no trace.
        """
        with self._lock:
            if current_task() != self._task:
                self._enter_task(sync)
            if not sync:
                return
            if not self._sync:
                self._begin_sync()
            if not self._committed:
                self._committed = any(will_accumulate(node) for node in self._accumulators)

    def _gradient_came(self, index: int, count: int) -> None:
        if not self.passes:
            self._ready_order.append(index)
        expected = self._expected
        if expected is None:
            return
        if count != expected[index]:
            if count > expected[index] and not self._static and count == 2:
                self._report.repeated.append(self._names[index])
            return
        if not self._batched:
            self._collect(index)
        bucket = self._bucket_of[index]
        if bucket.mark_ready():
            self._launch_ready()

    def _collect(self, index: int) -> None:
        """Puts the gradient of a parameter into its bucket."""
        parameter = self._parameters[index]
        grad = parameter.grad
        view = self._views[index]
        if grad is view:
            return
        try:
            if self._in_double_backward:
                with torch.no_grad():
                    view.copy_(grad)  # type: ignore[arg-type]
            else:
                view.copy_(grad)  # type: ignore[arg-type]
            if self._view_mode:
                parameter.grad = view
        except Exception as error:  # noqa: BLE001 - told to all ranks at the end of the pass
            self._note_bad_gradient(index, grad, error)

    def _note_bad_gradient(self, index: int, grad: torch.Tensor | None, error: Exception) -> None:
        if grad is not None and grad.layout is not torch.strided:
            reason = (
                f"the gradient of {self._names[index]} has layout {grad.layout}, but only dense gradients are averaged; make the layer "
                "produce dense gradients (sparse=False)"
            )
        else:
            reason = f"the gradient of {self._names[index]} could not be put into its bucket: {error}"
        self._report.errors.append(reason)

    def _collect_absent(self, index: int) -> None:
        """Contributes for a parameter that this pass gave no gradient: what was accumulated before, else zeros."""
        parameter = self._parameters[index]
        grad = parameter.grad
        view = self._views[index]
        self._absent.append(index)
        if grad is None:
            view.zero_()
        elif grad is view:
            self._kept[index] = grad.clone()
        else:
            try:
                view.copy_(grad)
            except Exception as error:  # noqa: BLE001 - told to all ranks at the end of the pass
                self._note_bad_gradient(index, grad, error)
        self._bucket_of[index].mark_ready()

    # ---- launch ------------------------------------------------------------------------------------------------------------------------

    def _launch_ready(self) -> None:
        """Launches full buckets in order, up to the first that is not full (section 3.2.3 of the paper, Fig. 3(a))."""
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._next = bucket.index + 1
        last = self._next == len(self._buckets)
        if self._batched:
            self._collect_batch(bucket)
        try:
            if self._hook is not None:
                names = [self._names[i] for i in bucket.indices]
                future = self._hook(self._hook_state, GradBucket(bucket, names, last=last))
                if not isinstance(future, (Future, torch._C.Future)):
                    raise TypeError(
                        f"the communication hook must return a torch.futures.Future of a tensor, but returned a value of type "
                        f"{type(future).__name__} for bucket {bucket.index}"
                    )
                bucket.mark_launched(future=future)
                return
            if last and bucket.flag is not None:
                bucket.flag.fill_(float(bool(self._report)))
            bucket.mark_launched(work=average(self._group, bucket.wire))
        except BaseException:
            self._broken = True
            raise

    def _collect_batch(self, bucket: Bucket) -> None:
        """Puts the gradients of a full bucket into it, all at once."""
        views, grads, moved = [], [], []
        absent = set(self._absent)
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            grad = self._parameters[index].grad
            if index in absent or grad is view:
                continue
            if grad is None or grad.layout is not torch.strided or grad.shape != view.shape:
                self._collect(index)
                continue
            views.append(view)
            grads.append(grad)
            moved.append(index)
        if not views:
            return
        with torch.no_grad():
            torch._foreach_copy_(views, grads)
        if self._view_mode:
            for index in moved:
                self._parameters[index].grad = self._views[index]

    # ---- end of a synchronised pass ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Gives the peers what this rank still owes, waits, writes the averages to ``.grad`` and finds out whether all ranks are well."""
        learning = self._expected is None
        self._complete_buckets()
        self._launch_ready()
        if self._usage is not None:
            self._usage.start(self._used if self._needs_usage() else (), trouble=bool(self._report))
        self._wait_for_buckets()
        counts = self._verdict()
        for index in self._absent:
            self._deliver_absent(
                index, used=counts[index] > 0 if counts else index not in self._unused_everywhere
            )
        if learning:
            self._expected = list(self._counts)
            self._idle = [index for index, count in enumerate(self._counts) if not count]
            self._unused_everywhere = frozenset(index for index in self._idle if not counts[index])
            self._usage = self._make_usage_map()
        self._used = [0] * len(self._used)
        self._after_good_pass()

    def _complete_buckets(self) -> None:
        """Collects what the hooks did not, and reports what should not have been absent."""
        counts, expected = self._counts, self._expected
        if counts == expected:
            return
        for index, count in enumerate(counts):
            if expected is not None and count >= expected[index]:
                continue
            if count:
                if not self._batched:
                    self._collect(index)
                self._bucket_of[index].mark_ready()
            else:
                self._collect_absent(index)
        if self._static and expected is not None:
            self._report.changed = [
                name for name, count, once in zip(self._names, counts, expected, strict=True) if count != once
            ]
        elif not self._find_unused and not self._static:
            self._report.missing = [
                name for name, count in zip(self._names, counts, strict=True) if not count
            ]

    def _wait_for_buckets(self) -> None:
        absent = set(self._absent)
        failure: Exception | None = None
        for bucket in self._buckets:
            try:
                bucket.wait()
                if failure is None and not self._report and not self._view_mode:
                    self._write_back(bucket, absent)
            except Exception as error:  # noqa: BLE001 - raised below, after the others ended
                failure = failure or error
        if failure is not None:
            raise failure

    def _write_back(self, bucket: Bucket, absent: set[int]) -> None:
        """Copies the averages of a bucket to ``.grad``."""
        views, grads = [], []
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
            if index in absent:
                continue
            grad = parameter.grad
            if grad is None:
                parameter.grad = view.clone()
            else:
                views.append(view)
                grads.append(grad)
        if views:
            torch._foreach_copy_(grads, views)

    def _verdict(self) -> list[int]:
        """Returns on how many ranks each parameter took part, where the ranks counted that.

        Raises:
            GradientSyncError: a rank is in trouble; raised on all ranks.
        """
        counts: list[int] = []
        trouble = False
        if self._usage is not None:
            counts, trouble = self._usage.wait()
        elif not self._hook_is_local:
            flag = self._buckets[-1].flag
            trouble = self._hook is None and flag is not None and bool(flag.item())
        elif self._needs_usage():
            counts = self._used
        if trouble:
            raise ReportExchange(self._group, self._report, self._device).error(self._model)
        if self._report:
            raise sync_error(self._group, self._model, {self._group.rank(): self._report.encode()})
        return counts

    def _deliver_absent(self, index: int, *, used: bool) -> None:
        """Writes the average of a parameter that was absent here; leaves ``.grad`` as it was where it was absent on all ranks."""
        parameter = self._parameters[index]
        view = self._views[index]
        if not used:
            if index in self._kept:
                view.copy_(self._kept[index])
        elif self._view_mode:
            parameter.grad = view
        elif parameter.grad is None:
            parameter.grad = view.clone()
        else:
            parameter.grad.copy_(view)

    def _after_good_pass(self) -> None:
        if self.passes and self._counts != self._last_counts:
            self.same_usage = False
        self._last_counts = self._counts
        if not self.passes:
            latest = list(reversed(dict.fromkeys(reversed(self._ready_order))))
            seen = set(latest)
            self._traced_order = latest + [i for i in range(len(self._parameters)) if i not in seen]
        self.passes += 1


def _gradient_hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:  # noqa: ARG001
        live = reducer()
        if live is not None:
            live.autograd_hook(index)

    return hook


def _output_hook(reducer: weakref.ref[Reducer], sync: bool) -> Callable[[torch.Tensor], None]:
    def hook(grad: torch.Tensor) -> None:  # noqa: ARG001
        live = reducer()
        if live is not None:
            live.output_hook(sync)

    return hook
