"""The reducer: averages gradients over all ranks while the backward pass computes them.

Words used here. A *task* is one run of the autograd engine; a task within a task (reentrant activation
checkpointing) is *nested*. A *pass* is one backward pass of the user: the outermost task with those nested in
it. A pass is *synchronised* where a forward that it belongs to ran outside ``no_sync``.

Algorithm 1 of PyTorch Distributed (VLDB 2020, section 3.2): one hook for each parameter puts the gradient
into its bucket; full buckets are reduced asynchronously, strictly in the order of the buckets, which is the
same on all ranks; the pass ends with a wait for all of them. Unlike there, the graph is never walked: what
is absent from the pass is what the engine has not delivered when it ends.

The life of a pass: the first hook that runs begins it (:meth:`Reducer._enter_task`); a synchronised one takes
gradients (:mod:`collectives.ddp.reducer.intake`) and launches buckets
(:mod:`collectives.ddp.reducer.bucket_reducer`); at the end of the outermost task it is finished
(:meth:`Reducer._finish`), or abandoned where an exception broke it off. What the ranks tell each other about
it is in :mod:`collectives.ddp.sync.consensus`, what it should have brought in
:mod:`collectives.ddp.unused_parameters.usage`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from collectives import ProcessGroup
from collectives.ddp.autograd.engine import (
    NO_TASK,
    GradientHooks,
    OutputHook,
    TaskGuard,
    accumulator,
    current_task,
    runs_backward,
    will_accumulate,
)
from collectives.ddp.reducer.averaging import Averager
from collectives.ddp.reducer.bucket_reducer import Hook, Launcher
from collectives.ddp.reducer.grad_bucket import BucketLayout
from collectives.ddp.reducer.gradients import Gradients
from collectives.ddp.reducer.intake import Intake
from collectives.ddp.reducer.options import ReducerOptions
from collectives.ddp.reducer.order import OrderTrace, agree_on_order
from collectives.ddp.reducer.passes import Forward, Pass, Progress
from collectives.ddp.reducer.sparse import SparseGradients
from collectives.ddp.sync.consensus import Consensus
from collectives.ddp.sync.error_report import Report
from collectives.ddp.timing import STATISTICS_LEVEL, IterationClock, Mark
from collectives.ddp.unused_parameters.skipping import Skipping
from collectives.ddp.unused_parameters.usage import Usage

__all__ = ["Hook", "Reducer"]

_log = logging.getLogger(__name__)

_ELSEWHERE = -1
"""Stands for the index of a parameter that is not the model's."""


class Reducer:
    """Averages the gradients of some parameters over a group, in place, at every synchronised pass.

    All ranks make one with the same parameters in the same order. It holds hooks on the parameters until it
    is deleted or closed; they hold it weakly.

    Attributes:
        gradients: the gradients and their buckets.
        passes: number of synchronised passes that ended well.
        usage: which parameters they used.
        initial_bucket_bytes: sizes of the buckets before the first pass.
        has_rebuilt_buckets: whether the ranks have agreed on the order of the gradients.
        clock: times of the iterations.

    Args:
        parameters: parameters that need gradients, by name.
        group: the ranks.
        options: the options.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], group: ProcessGroup, options: ReducerOptions
    ) -> None:
        self._group = group
        self._model = options.model
        self._frozen = options.frozen
        self._casts = options.casts
        self._device = next(iter(parameters.values())).device
        self._averager = Averager(group)
        for parameter in parameters.values():
            real = parameter.is_floating_point() and options.wire_dtype
            self._averager.check(real or parameter.dtype, parameter.device)
        self.usage = Usage(
            list(parameters),
            find_unused=options.find_unused_parameters or options.skip_unused,
            static=options.static_graph,
        )
        self._order = OrderTrace(range(len(parameters) - 1, -1, -1))
        self._consensus = Consensus(self._averager, options.model, self.usage, self._order, self._device)
        places = {id(parameter): index for index, parameter in enumerate(parameters.values())}
        self._trigger = None if options.trigger is None else places.get(id(options.trigger), _ELSEWHERE)
        self.gradients = Gradients(
            parameters,
            options.limits,
            tail=self._consensus.tail_size,
            as_views=options.gradient_as_bucket_view,
            batched=options.batched_grad_copy,
            sparse=[index for index, name in enumerate(parameters) if name in options.sparse],
            delayed=[index for index, name in enumerate(parameters) if name in options.delayed],
            trigger=self._trigger,
            wire_dtype=options.wire_dtype,
        )
        self.clock = IterationClock(self._device)
        rows = {index: self.gradients.parameters[index] for index in self.gradients.sparse}
        self._launcher = Launcher(
            self.gradients,
            self._averager,
            SparseGradients(rows, self._averager, self._device) if rows else None,
        )
        self._launcher.clock = self.clock
        self.initial_bucket_bytes = [bucket.nbytes for bucket in self.gradients.buckets]
        self._lock = threading.RLock()

        self.passes = 0
        self.has_rebuilt_buckets = False
        self._must_agree = False
        self._latest: Forward | None = None
        self._followed: list[Forward] = []
        self._open: set[int] = set()
        self._task = NO_TASK
        self._pass = Pass([], Report(), ())

        nodes = [accumulator(parameter) for parameter in self.gradients.parameters]
        self._accumulators = {node: index for index, node in enumerate(nodes)}
        self._skipping: Skipping | None = None
        if options.skip_unused:
            self._skipping = Skipping(group, self.usage, self._accumulators, self._device)
        self._intake = Intake(self.gradients, self._launcher, self.usage, self._skipping)
        self._reset()
        hooked = [(parameter, index) for index, parameter in enumerate(self.gradients.parameters)]
        if options.trigger is not None and self._trigger == _ELSEWHERE:
            hooked.append((options.trigger, _ELSEWHERE))
        self._hooks = GradientHooks(self, hooked)

    def __del__(self) -> None:
        if hasattr(self, "_hooks"):
            self.close()

    def close(self) -> None:
        """Removes the hooks from the parameters; idempotent."""
        self._hooks.remove()

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
            for parameter, count in zip(self.gradients.parameters, self.usage.counts, strict=False)
            if not count
        )

    @property
    def ready_order(self) -> list[int]:
        """Indices of the parameters in the order of their gradients in the last pass that ended well."""
        return self._order.latest if self.passes else []

    def register_hook(self, state: object, hook: Hook, *, is_local: bool) -> None:
        """Hands the reduction of full buckets to a communication hook."""
        self._launcher.hook = hook, state
        self._launcher.is_local = self._consensus.is_local = is_local
        if self._skipping is not None:
            self._skipping.is_local = is_local
        self.gradients.pack_all()
        if not is_local:
            self._consensus.send_apart()

    def layouts(self) -> list[BucketLayout]:
        """Returns what lies in the buckets."""
        return self._launcher.layouts()

    def set_static_graph(self) -> None:
        """Promises from now on that all passes use the parameters alike."""
        self.usage.set_static()
        self._consensus.resize()
        self.gradients.set_tail(self._consensus.tail_size)

    def before_forward(self) -> None:
        """Lays the buckets out again where the ranks know that they should agree on the order of gradients.

        Hooks that others registered on the parameters run before the reducer's from now on.

        Called before each synchronised forward, on all ranks.
        """
        self._hooks.come_last()
        self._settle()
        if not self._must_agree or self._open:
            return
        self._must_agree = False
        if self._launcher.is_local:
            order = self._order.latest
        else:
            order = agree_on_order(self._group, self._order.latest, self._device)
        self._order.agreed()
        self.has_rebuilt_buckets = True
        self._launcher.lay_out(order)

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor], sync: bool, *, training: bool) -> None:
        """Tells what the backward pass of the forward that just ran must do.

        Called at the end of each forward that records a graph. The pass begins when the engine reaches one of
        the outputs; where it reaches a parameter without that, the pass is taken for the latest forward's.

        Args:
            outputs: tensors that the forward returned.
            sync: whether gradients are averaged; ``False`` under ``no_sync``.
            training: whether the forward is one that all ranks run, as in training.
        """
        self._consensus.progress.forwards += training
        self._latest = forward = Forward(sync)
        hook = OutputHook(self, forward)
        tensors = [output for output in outputs if output.requires_grad and not output.is_leaf]
        if sync and self._skipping is not None and self._skipping.walks:
            self._skipping.walk(forward, tensors)
        for output in tensors:
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    # ---- uneven inputs -----------------------------------------------------------------------------------

    def enter_join(self) -> None:
        """Brings the ranks in step; called by all of them when they begin to train on uneven inputs.

        What ranks did apart from each other before does not count: a forward without a backward pass, as
        before an exception, or passes under ``no_sync`` of ranks that had more inputs.
        """
        self._consensus.progress = Progress(accumulated=self._consensus.progress.has_gradients())

    def call_before_passes(self, call: Callable[[], None] | None) -> None:
        """Sets what is called before a pass communicates; an exception of it breaks the pass off."""
        self._launcher.before_pass = call

    def divide_by(self, divisor: int | None) -> None:
        """Sets what sums of gradients are divided by; ``None`` for the number of ranks, the default."""
        self._averager.divisor = divisor

    def follow_forward(self) -> None:
        """Takes part in a synchronised forward of other ranks, in place of :meth:`prepare_for_backward`."""
        if self._skipping is not None and self._skipping.walks:
            forward = Forward(sync=True)
            self._skipping.walk(forward, ())
            self._followed.append(forward)

    def follow_backward(self) -> None:
        """Takes part in a synchronised pass of other ranks; writes the averages to ``.grad``. Blocks.

        This rank contributes what it has accumulated under ``no_sync``, else zeros. Where no rank used a
        parameter, its ``.grad`` becomes ``None``.

        Raises:
            GradientSyncError: a rank is in trouble; raised on all ranks.
        """
        if self._launcher.is_local:
            return
        with self._lock, torch.no_grad():
            self._settle()
            current = self._pass
            current.follows = current.committed = True
            current.silent = not self._consensus.progress.has_gradients()
            current.forwards, self._followed = self._followed, []
            self._latest = None
            try:
                self._begin_sync()
                self._finish(current)
            finally:
                self._reset()

    # ---- what the autograd engine calls ------------------------------------------------------------------

    def autograd_hook(self, index: int) -> None:
        """Called when the gradient of a parameter was accumulated in ``.grad``."""
        with self._lock:
            if current_task() != self._task:
                self._enter_task(None)
            current = self._pass
            if index == self._trigger:
                current.triggered = True
                if index == _ELSEWHERE:
                    if current.sync:
                        self._launcher.launch_full(current)
                    return
            count = current.counts[index] + 1
            current.counts[index] = count
            if current.sync:
                self._intake.gradient_came(current, index, count)

    def output_hook(self, forward: Forward) -> None:
        """Called when the gradient of an output of forward was computed.

        It may be the beginning of ``torch.autograd.grad``, which accumulates nothing: such a task leaves no
        trace.
        """
        with self._lock:
            current = self._pass
            if forward not in current.forwards:  # before the pass begins with what its forwards reach
                current.forwards.append(forward)
            if current_task() != self._task:
                self._enter_task(forward)
            if not forward.sync:
                return
            if not current.sync:
                self._begin_sync()
            if not current.committed:
                current.committed = any(map(will_accumulate, self._accumulators)) or runs_backward()

    def end_task(self, task: int) -> None:
        """Called when a task is complete; what is raised here, ``backward()`` raises."""
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            current = self._pass
            try:
                if not current.took_part():
                    return
                self.usage.add(current.counts)
                if current.sync:
                    self._latest = None
                    with torch.no_grad():
                        self._finish(current)
                elif current.forwards:
                    self._consensus.progress.unsynced += 1
            finally:
                self._reset()

    def fail_task(self, task: int) -> None:
        """Called when an exception broke a task off."""
        with self._lock:
            self._open.discard(task)
            self._task = NO_TASK
            if self._open:
                return
            current = self._pass
            try:
                if current.sync and current.took_part() and not current.broken:
                    self._latest = None
                    with torch.no_grad(), contextlib.suppress(Exception):
                        self._abandon(current)
            finally:
                self._reset()

    # ---- passes ------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Ends the pass."""
        if self._pass.sync:
            if self._pass.took_part():
                self.usage.clear()
                self._consensus.progress = Progress()
                for forward in self._pass.forwards:
                    forward.averaged = True
                if self._skipping is not None:
                    self._skipping.forget_averaged()
            self._launcher.end()
        self._open.clear()
        self._task = NO_TASK
        if self._casts is not None and self._pass.entered:
            self._casts.leave()
            if self._pass.took_part():
                self._casts.forget()
        count = len(self.gradients)
        self._pass = Pass([0] * count, Report(total=count), self.usage.used)

    def _enter_task(self, forward: Forward | None) -> None:
        """Notes that hooks now run in another task than before; the first task of all begins a pass."""
        task = current_task()
        if task not in self._open:
            begins = not self._open
            TaskGuard(self, task)
            self._open.add(task)
            self._pass.nested = not begins
            if begins:
                self._settle()
                if self._casts is not None:
                    self._casts.enter()
                    self._pass.entered = True
                forward = forward or self._latest
                if forward is not None and forward.sync:
                    self._begin_sync()
        self._task = task

    def _begin_sync(self) -> None:
        """Makes the pass a synchronised one; gradients that came before are taken now."""
        current = self._pass
        current.sync = True
        self.clock.mark(Mark.BACKWARD_BEGIN)
        self._launcher.begin(self._consensus.fill_tail)
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            current.report.errors.append(
                f"{', '.join(thawed)} needed no gradient when the module was wrapped, but need one now; wrap "
                "the module again after such a change"
            )
        self._intake.begin(current)

    def _abandon(self, current: Pass) -> None:
        """Gives the peers of a pass that broke off here what they wait for, and the report."""
        current.report.errors.append(
            "its backward pass was broken off by an exception, which is raised there"
        )
        if self._launcher.is_local:
            return
        self._launcher.abandon(current)
        self._consensus.abandon(current)

    def _settle(self) -> None:
        """Waits for what a pass that broke off has issued; its error was raised then."""
        self._launcher.settle()
        self._consensus.settle()

    # ---- end of a synchronised pass ----------------------------------------------------------------------

    def _finish(self, current: Pass) -> None:
        """Gives the peers what is still owed, waits, writes ``.grad``, asks whether all ranks are well."""
        current.ending = True
        self.clock.mark(Mark.BACKWARD_END)
        self._intake.complete(current)
        self._launcher.launch_full(current)
        self._launcher.collect(current)
        self._consensus.start(current)
        tail = self.gradients.buckets[-1].tail
        if self._launcher.hook is None:
            self._launcher.finish(current)
            timed = self.clock.end()
            heard = self._consensus.hear(current, tail)
        else:  # the signals tell of the hooks; gradients of a bad pass stay as they are
            heard = self._consensus.hear(current, tail)
            self._launcher.finish(current)
            timed = self.clock.end()
        unused = {*self.usage.unused(heard.unused), *current.skipped}
        for index in current.absent:
            self.gradients.deliver_absent(index, used=index not in unused)
            if current.silent and index in unused:  # as on ranks that zeroed their gradients
                self.gradients.parameters[index].grad = None
        self._must_agree = heard.wish or not self.passes
        if current.follows:
            self.usage.note_followed(heard.unused)
        else:
            self.usage.note(current.counts, heard.unused)
            self._order.note(current.came)
        self.passes += 1
        if timed:
            self._log_times()

    def _log_times(self) -> None:
        if _log.isEnabledFor(STATISTICS_LEVEL) and (latest := self.clock.latest()) is not None:
            _log.log(
                STATISTICS_LEVEL, "[rank %d] %s, iteration %d: %s",
                self._group.rank(), self._model, self.passes, latest[0],
            )  # fmt: skip
